"""The content codings of HTTP bodies: gzip and deflate, both ways, within a limit."""

import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from xlaserve.errors import InvalidBody, TooLarge, Unsupported
from xlaserve.tensors import Buffer

_GZIP_BITS, _ZLIB_BITS, _BARE_BITS = 31, 15, -15
_LEVEL = 1
"""Tensors compress badly: more effort is spent on the time than on the size."""
_STEP_BYTES = 1 << 20

IDENTITY = "identity"
CODINGS: Mapping[str, int] = MappingProxyType(
    {"gzip": _GZIP_BITS, "x-gzip": _GZIP_BITS, "deflate": _ZLIB_BITS}
)
"""Content coding -> window bits of zlib, in the order in which answers prefer them."""


class UnsupportedEncoding(Unsupported):
    """A body in a content coding that is not read here (HTTP 501 with `Accept-Encoding`)."""

    def __init__(self, coding: str) -> None:
        super().__init__(f"the content encoding '{coding[:40]}'")


def inflate(coding: str, body: Buffer, limit_bytes: int) -> memoryview:
    """Decompress a body; raises InvalidBody, or TooLarge before more than the limit is held."""
    data = memoryview(body)
    bits = CODINGS[coding]
    if bits == _ZLIB_BITS and data and data[0] & 0x0F != zlib.DEFLATED:
        bits = _BARE_BITS  # what some clients call deflate has no header
    out = bytearray()
    while True:
        stream = zlib.decompressobj(bits)
        data = _inflate_stream(stream, data, out, limit_bytes)
        if not stream.eof:
            raise InvalidBody(f"the {coding} body ends too early")
        if not data or bits != _GZIP_BITS:
            break
    if data:
        raise InvalidBody(f"{len(data)} bytes follow the {coding} body")
    return memoryview(out)


def _inflate_stream(
    stream: "zlib._Decompress", data: memoryview, out: bytearray, limit_bytes: int
) -> memoryview:
    rest: Buffer = data
    while not stream.eof:
        try:
            piece = stream.decompress(rest, min(_STEP_BYTES, limit_bytes - len(out) + 1))
        except zlib.error as error:
            raise InvalidBody(f"the body cannot be decompressed: {error}") from None
        out += piece
        if len(out) > limit_bytes:
            raise TooLarge("the decompressed body", limit_bytes, "max_message_bytes")
        rest = stream.unconsumed_tail
        if not piece and not rest:
            break
    return memoryview(stream.unused_data)


def deflate(coding: str, parts: Sequence[Buffer]) -> bytes:
    """Compress a body that is in pieces."""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, CODINGS[coding])
    pieces = [stream.compress(part) for part in parts]
    return b"".join([*pieces, stream.flush()])


def request_coding(content_encoding: str) -> str:
    """Return the coding of a request body; raises UnsupportedEncoding."""
    coding = content_encoding.strip().lower()
    if coding in ("", IDENTITY) or coding in CODINGS:
        return coding or IDENTITY
    raise UnsupportedEncoding(coding)


def accepted_coding(accept_encoding: str) -> str:
    """Return the coding to answer in: the best that `Accept-Encoding` lets us use."""
    weights: dict[str, float] = {}
    for item in accept_encoding.lower().split(","):
        name, _, parameters = item.partition(";")
        weights[name.strip()] = _weight(parameters)
    best = max(CODINGS, key=lambda coding: weights.get(coding, 0))
    return best if weights.get(best, 0) > 0 else IDENTITY


def _weight(parameters: str) -> float:
    _, _, text = parameters.partition("q=")
    try:
        return float(text) if text else 1.0
    except ValueError:
        return 0.0
