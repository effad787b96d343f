"""Memory accounting of an HTTP connection: request, response, and pipelined bytes."""

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
    """Return how many bytes of a body are read before it is granted memory.

    Up to twice as many may arrive. `limit` is the ledger's: the bytes read for all waiting
    connections are a small part of it.
    """
    return max(_LEAST_READ_BYTES, min(_READ_BYTES, limit // _READ_PART))


class Held:
    """The memory account of a connection, reused for each request."""

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
        """Whether a response is being written; it stays charged until all of it is written."""
        self._is_paused = False
        """Whether the client has stopped reading."""
        self.is_waiting = False
        """Whether the request is waiting for memory."""
        self._wire_left = 0
        self.has_overrun = False
        """Whether a body exceeded its wire limit, so that the connection is no longer read."""
        self.on_overrun: Callable[[], None] | None = None
        """Called once when a body exceeds its wire limit."""

    def close(self) -> None:
        """Release everything when the connection ends."""
        self.account.close()

    # --- The request ---

    async def reserve(self, count: int) -> None:
        """Reserve memory for a body before reading it, and wait for memory if necessary.

        Raises BudgetExhausted if the request may not wait: it needs more than a connection may
        hold, or waiting requests hold too much already.
        """
        account = self.account
        if account.admits(count) and not account.ledger.is_behind(count):
            account.hold(count)
            return
        # Charge the bytes that the connection still reads while the request waits.
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
        """Add `count` bytes, possibly negative, to the request's charge; raises BudgetExhausted."""
        if count < 0:
            self.account.release(-count)
        elif not self.account.reserve(count):
            raise self.account.refusal(what, count)

    def end_request(self) -> None:
        """Release the request's charge, because its response is complete."""
        self.is_waiting = False
        self.account.release_all(Kind.REQUESTS)

    # --- Limits on received bytes ---

    def bound_wire(self, count: int, on_overrun: Callable[[], None]) -> None:
        """Call `on_overrun` if more than this many bytes arrive from now on."""
        self._wire_left = count
        self.on_overrun = on_overrun

    def unbound_wire(self) -> None:
        """Stop counting arriving bytes."""
        self.on_overrun = None

    def arrived(self, count: int) -> None:
        """Count received bytes against the limit."""
        overrun = self.on_overrun
        if overrun is not None:
            self._wire_left -= count
            if self._wire_left < 0:
                self.on_overrun = None
                self.has_overrun = True
                # The rest is not even read and discarded: the connection will be closed.
                self._transport.pause_reading()
                overrun()

    # --- Pipelined bytes ---

    def set_ahead(self, size: int) -> None:
        """Set the charge for pipelined bytes."""
        change = size - self.account.held_for(Kind.AHEAD)
        if change > 0:
            self.account.hold(change, Kind.AHEAD)
        elif change:
            self.account.release(-change, Kind.AHEAD)

    # --- The response ---

    def begin_part(self, size: int) -> None:
        """Charge a response, or a part of it, until `end_answer`; raises BudgetExhausted.

        A short answer is charged only if the transport has to buffer it.
        """
        if size > JOINED_BYTES:
            if not self.account.reserve(size, Kind.ANSWERS):
                raise self.account.refusal("the answer", size)
            self._answers = True

    def begin_admitted(self, size: int) -> None:
        """Charge a response whose call has already been granted the memory, until `end_answer`."""
        self.account.hold(size, Kind.ANSWERS)
        self._answers = True

    def end_answer(self) -> None:
        """Note that the whole response was written to the transport, which may still buffer it."""
        self._answers = False
        if not self._is_paused:
            self.account.release_all(Kind.ANSWERS)

    @property
    def waits_in_transport(self) -> int:
        """Return the number of unsent bytes in the transport's write buffer."""
        return self._transport.get_write_buffer_size()

    def pause(self) -> None:
        """Charge the transport's write buffer while the client does not read."""
        self._is_paused = True
        more = self.waits_in_transport - self.account.held_for(Kind.ANSWERS)
        if more > 0:
            self.account.hold(more, Kind.ANSWERS)

    def resume(self) -> None:
        """Release that charge, because the client has read nearly everything."""
        self._is_paused = False
        if not self._answers:
            self.account.release_all(Kind.ANSWERS)
