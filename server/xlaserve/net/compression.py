"""Inflates requests step by step, to detect decompression bombs early; compresses answers."""

import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from xlaserve.net.memory import fresh
from xlaserve.tensors import Buffer

_GZIP_BITS, _ZLIB_BITS, _BARE_BITS = 31, 15, -15
_STEP_BYTES = 1 << 18
_USUAL_TIMES = 4
"""Initial estimate of the ratio of inflated to compressed size."""
_PART_BYTES = 1 << 14
"""Input bytes per call of zlib, which copies unused input."""
_MOST_MEMBERS = 10_000
"""Maximum gzip members per body: every member costs time, even an empty one."""

CODINGS: Mapping[str, int] = MappingProxyType(
    {"gzip": _GZIP_BITS, "x-gzip": _GZIP_BITS, "deflate": _ZLIB_BITS}
)
"""Coding -> zlib window bits, in order of preference for responses."""


_LEVEL = 1
"""The fastest level, because tensors compress badly at any level."""
_TRIED_BYTES = 64 << 10
_MOST_LEFT = 0.75
"""Maximum ratio of compressed to original size at which compression is considered worthwhile."""


def deflate(coding: str, parts: Iterable[Buffer]) -> bytes:
    """Compress the concatenation of `parts`."""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, CODINGS[coding])
    pieces = [stream.compress(part) for part in parts]
    return b"".join([*pieces, stream.flush()])


def deflate_where_worth(coding: str, parts: Sequence[Buffer], size: int) -> bytes | None:
    """Compress the concatenation of `parts`; None if that would save less than a quarter.

    For long data, a sample from the start is tried first: tensors are close to random, and
    compressing them takes ten times as long as sending them.
    """
    if size > _TRIED_BYTES:
        tried = _first(parts, _TRIED_BYTES)
        if len(deflate(coding, [tried])) > _MOST_LEFT * len(tried):
            return None
    whole = deflate(coding, parts)
    return whole if len(whole) <= _MOST_LEFT * size else None


def _first(parts: Iterable[Buffer], size: int) -> bytes:
    found = bytearray()
    for part in parts:
        found += memoryview(part).cast("B")[: size - len(found)]
        if len(found) >= size:
            break
    return bytes(found)


class BadCompression(Exception):
    """Malformed compressed data; the message is a predicate for the name of the data."""


class InflatesTooFar(Exception):
    """The decompressed data is longer than the limit."""


def inflate(coding: str, data: Buffer, limit_bytes: int) -> memoryview:
    """Decompress data. Raises BadCompression, and InflatesTooFar soon after the limit.

    Memory use never exceeds the limit by much.
    """
    inflation = Inflation(coding, data, limit_bytes)
    for capacity in inflation.capacities():
        if inflation.go_on(capacity):
            break
    return inflation.result()


async def inflate_within(
    coding: str,
    data: Buffer,
    limit_bytes: int,
    reserve: Callable[[int], None],
    run: Callable[[Callable[[], bool]], Awaitable[bool]],
) -> memoryview:
    """Decompress data in threads, reserving memory before each step.

    `reserve` reserves bytes, or releases them if its argument is negative, and raises if there is
    no memory. `run` runs a function in a thread. A decompression bomb holds at most twice the size
    inflated so far. Raises as `inflate` does.
    """
    inflation = Inflation(coding, data, limit_bytes)
    reserved = 0
    try:
        for capacity in inflation.capacities():
            reserve(capacity - reserved)
            reserved = capacity
            if await run(partial(inflation.go_on, capacity)):
                break
        inflated = inflation.result()
        reserve(len(inflated) - reserved)
        return inflated
    finally:
        inflation.end()


class Inflation:
    """Decompresses a body in steps of growing capacity.

    The whole input must be valid: gzip members are concatenated (RFC 1952 2.2), and trailing bytes
    are an error.
    """

    def __init__(self, coding: str, data: Buffer, limit_bytes: int) -> None:
        self._rest = memoryview(data)
        self._bits = CODINGS[coding]
        if self._bits == _ZLIB_BITS and self._rest and self._rest[0] & 0x0F != zlib.DEFLATED:
            self._bits = _BARE_BITS  # some clients send "deflate" without the zlib header
        self._limit = limit_bytes
        self._out = memoryview(b"")
        self._filled = 0
        self._stream = zlib.decompressobj(self._bits)
        self._members = 1
        self._is_over = False

    def capacities(self) -> Iterator[int]:
        """Yield increasing capacities to pass to `go_on`; the last is always sufficient."""
        longest = self._limit + _STEP_BYTES
        capacity = min(_STEP_BYTES + _USUAL_TIMES * len(self._rest), longest)
        while capacity < longest:
            yield capacity
            capacity = min(2 * capacity, longest)
        yield capacity

    def go_on(self, capacity: int) -> bool:
        """Inflate into a buffer of `capacity` bytes; true if that was all, false if it is full.

        Raises BadCompression, and InflatesTooFar soon after the limit is exceeded.
        """
        # Unused pages of the buffer never become resident.
        out = fresh(capacity).data
        out[: self._filled] = self._out[: self._filled]
        self._out = out
        while self._filled + _STEP_BYTES <= capacity and not self._is_over:
            self._step()
            if self._stream.eof:
                if not self._rest:
                    return True
                self._next_member()
        return False

    def result(self) -> memoryview:
        """Return the decompressed bytes."""
        return self._out[: self._filled]

    def end(self) -> None:
        """Stop and release all buffers, which an exception's frames might otherwise keep alive."""
        self._is_over = True
        self._out = self._rest = memoryview(b"")
        self._filled = 0

    def _step(self) -> None:
        part = self._rest[:_PART_BYTES]
        stream = self._stream
        try:
            piece = stream.decompress(part, min(_STEP_BYTES, self._limit - self._filled + 1))
        except zlib.error as error:
            raise BadCompression(f"cannot be decompressed: {error}") from None
        after = self._filled + len(piece)
        if after > self._limit:
            raise InflatesTooFar
        self._out[self._filled : after] = piece
        self._filled = after
        # At the end of a member, zlib may report the rest as both unused and unconsumed.
        left = len(stream.unused_data if stream.eof else stream.unconsumed_tail)
        self._rest = self._rest[len(part) - left :]
        if not part and not piece and not stream.eof:
            raise BadCompression("ends too early")

    def _next_member(self) -> None:
        if self._bits != _GZIP_BITS:
            raise BadCompression(f"has {len(self._rest)} bytes after its end")
        if self._members >= _MOST_MEMBERS:
            raise BadCompression(f"has more than {_MOST_MEMBERS} members")
        self._members += 1
        self._stream = zlib.decompressobj(self._bits)
