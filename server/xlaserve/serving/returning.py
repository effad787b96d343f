"""Gives memory back to the system that clients no longer make the server hold."""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable

import structlog

from xlaserve.net.ledger import Ledger
from xlaserve.process import allocator

LOOK_SECONDS = 1.0
"""Seconds from one look to the next."""
EXCESS_BYTES = 16 << 20
"""Bytes of growth since the last trim beyond which there is another one."""
_QUIET_BYTES = 1 << 20
"""Growth that counts as quiet."""
_BUSY_LOOKS = 10
"""Looks after which it is trimmed though it is not quiet."""
_LOG_SECONDS = 30.0
"""Seconds between two log lines about pressure."""

_log = structlog.get_logger("memory")


class Returning:
    """Trims the heap when it is quiet, and reports pressure on the ledger.

    A trim costs the next messages page faults, so there is none while large ones come and go, but
    for one in ten seconds. What the allocator keeps on purpose is given back as seldom.
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
        self._in_thread = in_thread
        self._quick_bytes = EXCESS_BYTES + kept_bytes
        """Bytes of growth that are given back as soon as it is quiet."""
        self._resident = resident
        self._trim = trim
        self._clock = clock
        self._settled: int | None = None
        """Least resident bytes since the last trim, less those held for clients."""
        self._looks = 0
        self._pressures = 0
        self._refused = 0
        self._logged_at: float | None = None
        """When the log reported pressure; None once it reported the end."""

    async def run(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Trim if that releases memory, and log changes of pressure."""
        self._report()
        ledger = self._ledger
        came, ledger.peak = ledger.peak - ledger.held, ledger.held
        resident = self._resident()
        if resident is None:
            return
        besides = resident - ledger.held
        if self._settled is None or besides < self._settled:
            self._settled = besides
        self._looks += 1
        excess = besides - self._settled
        if excess <= EXCESS_BYTES:
            return
        is_quiet = came <= _QUIET_BYTES and excess > self._quick_bytes
        if is_quiet or self._looks >= _BUSY_LOOKS:
            self._looks = 0
            await self._in_thread(self._give_back)
            left = self._resident()
            self._settled = None if left is None else left - ledger.held

    def _give_back(self) -> None:
        # Errors hold the frames that they went through, and these hold messages.
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
