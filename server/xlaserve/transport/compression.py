"""Inflates what clients send compressed, in steps: a bomb is known before it has gone off."""

import zlib
from collections.abc import Mapping
from types import MappingProxyType

from xlaserve.tensors import Buffer

_GZIP_BITS, _ZLIB_BITS, _BARE_BITS = 31, 15, -15
_STEP_BYTES = 1 << 20
"""How much is inflated at once."""
_PART_BYTES = 1 << 14
"""How much is given to zlib at once, which copies what it leaves."""
_MOST_MEMBERS = 10_000
"""Each takes time, however short it is."""

CODINGS: Mapping[str, int] = MappingProxyType(
    {"gzip": _GZIP_BITS, "x-gzip": _GZIP_BITS, "deflate": _ZLIB_BITS}
)
"""Coding -> window bits of zlib, in the order in which answers prefer them."""


class BadCompression(Exception):
    """The bytes are not what the coding makes; the text goes on behind what they are called."""


class InflatesTooFar(Exception):
    """There is more than the limit in it."""


def inflate(coding: str, data: Buffer, limit_bytes: int) -> memoryview:
    """Return what was compressed; raises before much more than the limit is held.

    All of the data counts: several members of gzip are one (RFC 1952, 2.2), and nothing else may
    follow. Raises BadCompression and InflatesTooFar.
    """
    rest = memoryview(data)
    bits = CODINGS[coding]
    if bits == _ZLIB_BITS and rest and rest[0] & 0x0F != zlib.DEFLATED:
        bits = _BARE_BITS  # what some clients call deflate has no header
    out = bytearray()
    for _ in range(_MOST_MEMBERS):
        rest = _inflate_member(bits, rest, out, limit_bytes)
        if not rest:
            return memoryview(out)
        if bits != _GZIP_BITS:
            raise BadCompression(f"has {len(rest)} bytes behind its end")
    raise BadCompression(f"has more than {_MOST_MEMBERS} members")


def _inflate_member(bits: int, data: memoryview, out: bytearray, limit_bytes: int) -> memoryview:
    """Inflate up to the end of a member and return what is behind it."""
    stream = zlib.decompressobj(bits)
    while not stream.eof:
        part = data[:_PART_BYTES]
        try:
            piece = stream.decompress(part, min(_STEP_BYTES, limit_bytes - len(out) + 1))
        except zlib.error as error:
            raise BadCompression(f"cannot be decompressed: {error}") from None
        out += piece
        if len(out) > limit_bytes:
            raise InflatesTooFar
        left = len(stream.unused_data) + len(stream.unconsumed_tail)
        data = data[len(part) - left :]
        if not part and not piece and not stream.eof:
            raise BadCompression("ends too early")
    return data
