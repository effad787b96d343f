"""Puts the messages of a request together (gRPC over HTTP/2, Length-Prefixed-Message)."""

from collections.abc import Callable
from enum import Enum, auto
from struct import Struct
from typing import TypeAlias

from xlaserve.net.memory import Octets
from xlaserve.tensors import ALIGNMENT

PREFIX = Struct(">BL")
"""In front of each message: whether it is compressed, and its length in bytes."""
PREFIX_BYTES = 5

_IN_PLACE_BYTES = 1 << 16
"""Messages that are longer are put where their tensor is aligned."""

Allocate: TypeAlias = Callable[[int], Octets]
"""Returns this many bytes, whatever is in them."""

Placement: TypeAlias = Callable[[memoryview, int], int]
"""Finds, in the first bytes of a message and from its length, where its large part begins."""


class Problem(Enum):
    """Why a request has no message that could be read."""

    NONE = auto()
    """It ended without one."""
    SECOND = auto()
    """There is more behind the one that a unary method takes."""
    TRUNCATED = auto()
    """It ended within one."""
    TOO_LARGE = auto()
    """The prefix says more than the limit."""
    FLAG = auto()
    """The first byte of the prefix is neither 0 nor 1."""
    EXPIRED = auto()
    """It did not come in time."""
    NO_MEMORY = auto()
    """Messages of other requests take all the memory that there is for them."""


class UnaryReader:
    """Receives the one message of a unary request into the memory that it stays in."""

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
        """Buffer of the message; None until its first byte is there."""
        self.filled = 0
        """Bytes of the message that have come."""
        self.length = -1
        """Bytes of the message; -1 until the prefix is there."""
        self.compressed = False

    def feed(self, chunk: memoryview) -> Problem | None:
        """Take what came; the chunk may be overwritten afterwards."""
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
        """Return how many bytes of the message have not come, as far as is known."""
        return max(0, self.length - self.filled)

    def space(self) -> memoryview | None:
        """Return where the next bytes of a long message go, to be received there directly."""
        if self.whole is None or self.length < _IN_PLACE_BYTES:
            return None
        return self.whole[self.filled :]

    def end(self) -> Problem | None:
        """Return the problem of a request that ends now, or None."""
        if self.length < 0:
            return Problem.TRUNCATED if self._prefix else Problem.NONE
        return Problem.TRUNCATED if self.filled < self.length else None

    def message(self) -> "memoryview | bytes":
        """Return the message, which has come whole."""
        return b"" if self.whole is None else self.whole


class StreamingReader:
    """Keeps what came of the messages of a streaming request until they are asked for."""

    __slots__ = ("_limit", "on_data", "received")

    def __init__(self, limit: int, on_data: Callable[[], None]) -> None:
        self._limit = limit
        self.received = bytearray()
        """Bytes of messages that nobody has asked for yet."""
        self.on_data = on_data
        """Called when there is more, or no more to come."""

    def feed(self, chunk: memoryview) -> Problem | None:
        """Take what came."""
        self.received += chunk
        self.on_data()
        return None

    @property
    def missing(self) -> int:
        """Return how many bytes the message that comes next lacks, as far as is known."""
        if len(self.received) < PREFIX_BYTES:
            return 0
        length: int = PREFIX.unpack_from(self.received)[1]
        if length > self._limit:
            return 0
        return max(0, PREFIX_BYTES + length - len(self.received))

    def next(self) -> "tuple[bool, bytes] | Problem | None":
        """Take the next message, and whether it is compressed; None when it is not there yet."""
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
        """Return how long the next message says that it is; its prefix is there."""
        return int(PREFIX.unpack_from(self.received)[1])

    def end(self) -> Problem | None:
        """Return the problem of a request that ends now, or None."""
        return Problem.TRUNCATED if self.received else None
