"""Inflates requests in steps, so that a bomb is found early; compresses answers."""

import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from xlaserve.net.memory import fresh
from xlaserve.tensors import Buffer

_GZIP_BITS, _ZLIB_BITS, _BARE_BITS = 31, 15, -15
_STEP_BYTES = 1 << 18
_USUAL_TIMES = 4
"""First estimate of the ratio of inflated to compressed bytes."""
_PART_BYTES = 1 << 14
"""Input bytes per zlib call, which copies the rest."""
_MOST_MEMBERS = 10_000
"""Limit of gzip members per body: every member costs time, even an empty one."""

CODINGS: Mapping[str, int] = MappingProxyType(
    {"gzip": _GZIP_BITS, "x-gzip": _GZIP_BITS, "deflate": _ZLIB_BITS}
)
"""Coding -> window bits of zlib, in the order in which answers prefer them."""


_LEVEL = 1
"""Tensors compress badly: more effort is spent on the time than on the size."""
_TRIED_BYTES = 64 << 10
_MOST_LEFT = 0.75
"""Compressed answers must shrink to this share."""


def deflate(coding: str, parts: Iterable[Buffer]) -> bytes:
    """Compress the pieces."""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, CODINGS[coding])
    pieces = [stream.compress(part) for part in parts]
    return b"".join([*pieces, stream.flush()])


def deflate_where_worth(coding: str, parts: Sequence[Buffer], size: int) -> bytes | None:
    """Compress the pieces; None if compression would not pay off.

    Of what is long the start is tried: numbers of a model are as good as random, and took ten times
    as long to compress as to send.
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
    """Malformed compressed bytes; the message follows their name."""


class InflatesTooFar(Exception):
    """There is more than the limit in it."""


def inflate(coding: str, data: Buffer, limit_bytes: int) -> memoryview:
    """Decompress; raises before much more than the limit is held.

    Raises BadCompression and InflatesTooFar.
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
    """Decompress in threads, reserving memory step by step beforehand.

    `reserve` counts so many bytes more, or fewer, and raises where there is no memory; `run` calls
    in a thread. A bomb thus holds no more than twice what it has become. Raises as `inflate` does.
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
    """Decompresses a body as far as memory allows.

    All of the data counts: several members of gzip are one (RFC 1952, 2.2), and nothing else may
    follow.
    """

    def __init__(self, coding: str, data: Buffer, limit_bytes: int) -> None:
        self._rest = memoryview(data)
        self._bits = CODINGS[coding]
        if self._bits == _ZLIB_BITS and self._rest and self._rest[0] & 0x0F != zlib.DEFLATED:
            self._bits = _BARE_BITS  # what some clients call deflate has no header
        self._limit = limit_bytes
        self._out = memoryview(b"")
        self._filled = 0
        self._stream = zlib.decompressobj(self._bits)
        self._members = 1
        self._is_over = False

    def capacities(self) -> Iterator[int]:
        """Yield capacities to try in turn; the last always suffices."""
        longest = self._limit + _STEP_BYTES
        capacity = min(_STEP_BYTES + _USUAL_TIMES * len(self._rest), longest)
        while capacity < longest:
            yield capacity
            capacity = min(2 * capacity, longest)
        yield capacity

    def go_on(self, capacity: int) -> bool:
        """Inflate into so many bytes of memory; true at the end, false where there is more.

        Raises BadCompression, and InflatesTooFar before much more than the limit is held.
        """
        # Pages of it that are not needed never become resident.
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
        """Release all buffers and stop: an exception may keep its frames alive."""
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
        # At the end of a member zlib may say of its rest both that it is unused and unconsumed.
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
