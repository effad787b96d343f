"""Memory trimming: returns free heap memory to the operating system."""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable

import structlog

from xlaserve.net.ledger import Ledger
from xlaserve.process import allocator

CHECK_SECONDS = 1.0
"""Interval between checks."""
EXCESS_BYTES = 16 << 20
"""Growth since the last trim that makes another one worthwhile."""
_QUIET_BYTES = 1 << 20
"""The server is quiet if the peak of client memory since the last check exceeds the current amount
by at most this.
"""
_BUSY_CHECKS = 10
"""Number of checks after which the heap is trimmed even if the server is not quiet."""
_LOG_SECONDS = 30.0
"""Minimum interval between log lines about memory pressure."""

_log = structlog.get_logger("memory")


class Returning:
    """Trims the heap while the server is quiet, and logs memory pressure.

    A trim causes page faults in the next messages; so while large messages arrive, there is only
    one every ten seconds. Memory that the allocator retains on purpose is returned equally seldom.
    """

    def __init__(
        self,
        ledger: Ledger,
        in_thread: Callable[[Callable[[], None]], Awaitable[None]],
        *,
        kept_bytes: int = 0,
        resident: Callable[[], int | None] = allocator.resident_bytes,
        trim: Callable[[], None] = allocator.trim,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._peak = ledger.watch()
        self._in_thread = in_thread
        self._quick_bytes = EXCESS_BYTES + kept_bytes
        """Growth above which a quiet server trims immediately."""
        self._resident = resident
        self._trim = trim
        self._clock = clock
        self._settled: int | None = None
        """Smallest value since the last trim of resident memory minus client memory; None if
        unknown.
        """
        self._checks = 0
        self._pressures = 0
        self._refused = 0
        self._logged_at: float | None = None
        """Time at which pressure was logged; None once its end was logged."""

    async def run(self) -> None:
        """Check once a second until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Trim the heap if that is worthwhile, and log changes of memory pressure."""
        self._report()
        ledger = self._ledger
        came = self._peak.take() - ledger.held
        resident = self._resident()
        if resident is None:
            return
        besides = resident - ledger.held
        if self._settled is None or besides < self._settled:
            self._settled = besides
        self._checks += 1
        excess = besides - self._settled
        if excess <= EXCESS_BYTES:
            return
        is_quiet = came <= _QUIET_BYTES and excess > self._quick_bytes
        if is_quiet or self._checks >= _BUSY_CHECKS:
            self._checks = 0
            await self._in_thread(self._give_back)
            left = self._resident()
            self._settled = None if left is None else left - ledger.held

    def _give_back(self) -> None:
        # Exceptions in reference cycles keep frames alive, and these keep messages.
        gc.collect()
        self._trim()

    def _report(self) -> None:
        ledger, now = self._ledger, self._clock()
        if self._logged_at is None:
            if ledger.pressures > self._pressures:
                self._logged_at = now
                _log.warning(
                    "client memory high",
                    held_bytes=ledger.held,
                    max_held_bytes=ledger.limit,
                    refused=ledger.refused - self._refused,
                )
        elif not ledger.is_pressed and now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = None
            _log.info(
                "client memory normal again",
                held_bytes=ledger.held,
                refused=ledger.refused - self._refused,
                waited=ledger.waited,
            )
            self._refused = ledger.refused
        else:
            return
        self._pressures = ledger.pressures
