"""The body of a request as it arrives, with backpressure."""

import asyncio
from collections import deque

from xlaserve.concurrency.completion import settle
from xlaserve.http.connection.chunks import BodyFault, Chunks


class Body:
    """The received bytes of one body; reading pauses while too many are unread."""

    __slots__ = (
        "_chunks",
        "_is_paused",
        "_left",
        "_most_bytes",
        "_pieces",
        "_size",
        "_transport",
        "_waiter",
        "fault",
        "is_complete",
        "length",
    )

    def __init__(self, length: int | None, transport: asyncio.Transport, most_bytes: int) -> None:
        """`length` is None for a chunked body. Reading pauses above `most_bytes` unread bytes."""
        self.length = length
        """Length of the body in bytes; None for a chunked body."""
        self._transport = transport
        self._most_bytes = most_bytes
        self._chunks = Chunks() if length is None else None
        self._left = length or 0
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._is_paused = False
        self.fault: BodyFault | None = None
        """A framing error, after which the start of the next request is unknown."""
        self.is_complete = length == 0
        """Whether the whole body has arrived."""

    @property
    def chunks(self) -> int:
        """Return the number of chunks received."""
        return 0 if self._chunks is None else self._chunks.count

    def feed(self, data: bytes) -> int:
        """Take bytes, and return how many of them belong to the body."""
        if self.fault is not None:
            return len(data)
        if self._chunks is None:
            used = min(len(data), self._left)
            self._left -= used
            self._keep(data[:used])
            self.is_complete = not self._left
        else:
            try:
                used = self._chunks.feed(data, self._keep)
            except BodyFault as fault:
                self.fault = fault
                used = len(data)
            self.is_complete = self._chunks.is_complete
        if self.is_complete or self.fault is not None:
            self._resume()
        elif self._size > self._most_bytes and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        if self._waiter is not None and (self._pieces or self.is_complete or self.fault):
            settle(self._waiter, None)
        return used

    def _keep(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._size += len(piece)

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    async def read(self) -> bytes:
        """Return the next bytes, or empty bytes at the end of the body. Raises BodyFault."""
        while not self._pieces and not self.is_complete:
            if self.fault is not None:
                raise self.fault
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces = self._pieces
        came = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._size = 0
        self._resume()
        return came

    async def drop(self) -> None:
        """Discard the rest of the body; raises BodyFault."""
        while await self.read():
            pass
