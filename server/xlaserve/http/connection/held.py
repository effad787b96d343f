"""The account of one HTTP connection: a request, its answer, and bytes sent ahead."""

import asyncio
from collections.abc import Callable
from functools import partial

from xlaserve.concurrency.completion import settle
from xlaserve.http.messages import JOINED_BYTES
from xlaserve.net.ledger import Account, Kind

_READ_BYTES = 256 << 10
_READ_PART = 256
_LEAST_READ_BYTES = 16 << 10


def read_bytes(limit: int) -> int:
    """Return how many bytes of an unwanted body are read; up to twice as many come.

    `limit` is that of the ledger: what all who wait have sent ahead is a small part of it.
    """
    return max(_LEAST_READ_BYTES, min(_READ_BYTES, limit // _READ_PART))


class Held:
    """The memory account of a connection, for one request after another."""

    __slots__ = (
        "_answers",
        "_is_paused",
        "_transport",
        "_wire_left",
        "account",
        "has_overrun",
        "is_waiting",
        "on_overrun",
    )

    def __init__(self, account: Account, transport: asyncio.Transport) -> None:
        self.account = account
        self._transport = transport
        self._answers = False
        """Whether an answer is being written: all of it counts until that completes."""
        self._is_paused = False
        """Whether the client does not read."""
        self.is_waiting = False
        """Whether the request waits for memory."""
        self._wire_left = 0
        self.has_overrun = False
        """Whether that has happened: the connection is no longer read."""
        self.on_overrun: Callable[[], None] | None = None
        """Called once when a body exceeds its reservation."""

    def close(self) -> None:
        """Release everything at the end of the connection."""
        self.account.close()

    # --- the request ---

    async def reserve(self, count: int) -> None:
        """Return once there is memory for a body of which nothing is kept yet.

        Raises BudgetExhausted where that is not worth waiting for.
        """
        account = self.account
        if account.admits(count) and not account.ledger.is_behind(count):
            account.hold(count)
            return
        # What is read of it nevertheless, while it waits.
        ahead = min(count, 2 * read_bytes(account.ledger.limit))
        account.hold(ahead)
        try:
            await self._wait(count)
        finally:
            account.release(ahead)

    async def _wait(self, count: int) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        wait = self.account.wait(count, partial(settle, granted, None))
        if wait is None:
            raise self.account.refusal("the body", count)
        self.is_waiting = True
        try:
            await granted
            self.is_waiting = False
        finally:
            wait.cancel()

    def grow(self, count: int, what: str = "the body") -> None:
        """Change the request's charge by a number of bytes; raises BudgetExhausted."""
        if count < 0:
            self.account.release(-count)
        elif not self.account.reserve(count):
            raise self.account.refusal(what, count)

    def end_request(self) -> None:
        """Release the request's charge: its answer is complete."""
        self.is_waiting = False
        self.account.release_all(Kind.REQUESTS)

    # --- what is around a body ---

    def bound_wire(self, count: int, on_overrun: Callable[[], None]) -> None:
        """Call `on_overrun` if more than this many bytes arrive from now on."""
        self._wire_left = count
        self.on_overrun = on_overrun

    def unbound_wire(self) -> None:
        """Stop counting arriving bytes."""
        self.on_overrun = None

    def arrived(self, count: int) -> None:
        """Count arrived bytes."""
        overrun = self.on_overrun
        if overrun is not None:
            self._wire_left -= count
            if self._wire_left < 0:
                self.on_overrun = None
                self.has_overrun = True
                # The rest is not even read to be dropped: the connection is closed.
                self._transport.pause_reading()
                overrun()

    # --- what comes ahead ---

    def set_ahead(self, size: int) -> None:
        """Charge bytes of pipelined requests."""
        change = size - self.account.held_for(Kind.AHEAD)
        if change > 0:
            self.account.hold(change, Kind.AHEAD)
        elif change:
            self.account.release(-change, Kind.AHEAD)

    # --- the answer ---

    def begin_part(self, size: int) -> None:
        """Charge an answer, or a part of it, until `end_answer`; raises BudgetExhausted.

        One that is short is counted only where it has to wait.
        """
        if size > JOINED_BYTES:
            if not self.account.reserve(size, Kind.ANSWERS):
                raise self.account.refusal("the answer", size)
            self._answers = True

    def begin_admitted(self, size: int) -> None:
        """Charge an answer until `end_answer` whose call was told that there is memory for it."""
        self.account.hold(size, Kind.ANSWERS)
        self._answers = True

    def end_answer(self) -> None:
        """Note that the transport has all of an answer, possibly buffered."""
        self._answers = False
        if not self._is_paused:
            self.account.release_all(Kind.ANSWERS)

    @property
    def waits_in_transport(self) -> int:
        """Return how many bytes wait in the transport for the client."""
        return self._transport.get_write_buffer_size()

    def pause(self) -> None:
        """Charge bytes in the transport while the client does not read."""
        self._is_paused = True
        more = self.waits_in_transport - self.account.held_for(Kind.ANSWERS)
        if more > 0:
            self.account.hold(more, Kind.ANSWERS)

    def resume(self) -> None:
        """Count it no more: the client has read nearly all."""
        self._is_paused = False
        if not self._answers:
            self.account.release_all(Kind.ANSWERS)
