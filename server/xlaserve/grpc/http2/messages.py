"""Reassembles the length-prefixed messages of a request (gRPC over HTTP/2)."""

from collections.abc import Callable
from enum import Enum, auto
from struct import Struct
from typing import TypeAlias

from xlaserve.net.memory import Octets
from xlaserve.tensors import ALIGNMENT

PREFIX = Struct(">BL")
"""The prefix of a message: compressed flag (0 or 1), length in bytes."""
PREFIX_BYTES = 5

_IN_PLACE_BYTES = 1 << 16
"""Messages of at least this length are placed in memory so that their tensor is aligned."""

Allocate: TypeAlias = Callable[[int], Octets]
"""Returns this many bytes of uninitialized memory."""

Placement: TypeAlias = Callable[[memoryview, int], int]
"""Returns the offset of a message's large tensor, given its first bytes and its length."""


class Problem(Enum):
    """Why a message of a request cannot be read."""

    NONE = auto()
    """The request ended without a message."""
    SECOND = auto()
    """A unary request has more than one message."""
    TRUNCATED = auto()
    """The request ended within a message."""
    TOO_LARGE = auto()
    """The length in the prefix exceeds the limit."""
    FLAG = auto()
    """The compressed flag of the prefix is neither 0 nor 1."""
    EXPIRED = auto()
    """The message did not arrive in time."""
    LATE = auto()
    """The client's deadline passed before the message was complete."""
    NO_MEMORY = auto()
    """Other requests occupy the memory available for messages."""


class UnaryReader:
    """Receives the message of a unary request into its final buffer."""

    __slots__ = (
        "_allocate",
        "_limit",
        "_placement",
        "_prefix",
        "compressed",
        "filled",
        "length",
        "whole",
    )

    def __init__(self, limit: int, placement: Placement | None, allocate: Allocate) -> None:
        self._limit = limit
        self._allocate = allocate
        self._placement = placement
        self._prefix = b""
        self.whole: memoryview | None = None
        """Buffer of the message; None until its first byte arrives."""
        self.filled = 0
        """Bytes of the message received so far."""
        self.length = -1
        """Length of the message in bytes; -1 until the prefix is complete."""
        self.compressed = False

    def feed(self, chunk: memoryview) -> Problem | None:
        """Copy a chunk of the request body into the message; return a problem, or None."""
        if self.length < 0:
            wanted = PREFIX_BYTES - len(self._prefix)
            self._prefix += chunk[:wanted]
            if len(self._prefix) < PREFIX_BYTES:
                return None
            chunk = chunk[wanted:]
            flag, self.length = PREFIX.unpack(self._prefix)
            if flag > 1:
                return Problem.FLAG
            if self.length > self._limit:
                return Problem.TOO_LARGE
            self.compressed = flag == 1
        count = len(chunk)
        if count:
            if count > self.length - self.filled:
                return Problem.SECOND
            whole = self.whole
            if whole is None:
                whole = self.whole = self._memory_for(chunk)
            whole[self.filled : self.filled + count] = chunk
            self.filled += count
        return None

    def _memory_for(self, first: memoryview) -> memoryview:
        if self.length < _IN_PLACE_BYTES:
            return memoryview(bytearray(self.length))
        memory = self._allocate(self.length + ALIGNMENT)
        large = self._placement(first, self.length) if self._placement else 0
        start = -(memory.ctypes.data + large) % ALIGNMENT
        return memory.data.cast("B")[start : start + self.length]

    @property
    def missing(self) -> int:
        """Return the number of missing bytes of the message; 0 while its length is unknown."""
        return max(0, self.length - self.filled)

    def space(self) -> memoryview | None:
        """Return the rest of a long message's buffer, to receive into directly; None if short."""
        if self.whole is None or self.length < _IN_PLACE_BYTES:
            return None
        return self.whole[self.filled :]

    def end(self) -> Problem | None:
        """Return the problem of a request that ends at this point, or None if it is complete."""
        if self.length < 0:
            return Problem.TRUNCATED if self._prefix else Problem.NONE
        return Problem.TRUNCATED if self.filled < self.length else None

    def message(self) -> "memoryview | bytes":
        """Return the message, which must be complete."""
        return b"" if self.whole is None else self.whole


class StreamingReader:
    """Buffers the messages of a streaming request until its method reads them."""

    __slots__ = ("_limit", "on_data", "received")

    def __init__(self, limit: int, on_data: Callable[[], None]) -> None:
        self._limit = limit
        self.received = bytearray()
        """Received bytes of messages that were not read yet."""
        self.on_data = on_data
        """Called when bytes arrive and when the request ends."""

    def feed(self, chunk: memoryview) -> Problem | None:
        """Append a chunk of the request body, and call `on_data`."""
        self.received += chunk
        self.on_data()
        return None

    @property
    def missing(self) -> int:
        """Return the number of missing bytes of the next message.

        Return 0 while its length is unknown, or if it is above the limit.
        """
        if len(self.received) < PREFIX_BYTES:
            return 0
        length: int = PREFIX.unpack_from(self.received)[1]
        if length > self._limit:
            return 0
        return max(0, PREFIX_BYTES + length - len(self.received))

    def next(self) -> "tuple[bool, bytes] | Problem | None":
        """Remove the next message; return its compressed flag and bytes, or None if incomplete."""
        if len(self.received) < PREFIX_BYTES:
            return None
        flag, length = PREFIX.unpack_from(self.received)
        if flag > 1:
            return Problem.FLAG
        if length > self._limit:
            return Problem.TOO_LARGE
        end = PREFIX_BYTES + length
        if len(self.received) < end:
            return None
        message = bytes(memoryview(self.received)[PREFIX_BYTES:end])
        del self.received[:end]
        return flag == 1, message

    def declared(self) -> int:
        """Return the length in the next message's prefix, which must be complete."""
        return int(PREFIX.unpack_from(self.received)[1])

    def end(self) -> Problem | None:
        """Return TRUNCATED if the request ends within a message, or None."""
        return Problem.TRUNCATED if self.received else None
