"""Encoding of gRPC-Web bodies: messages, then a trailers frame, in binary or base64.

As in gRPC's PROTOCOL-WEB.md: the highest bit of a frame's flag marks the trailers; in text mode,
a body is a sequence of base64 parts, each with its own padding (RFC 4648 4).
"""

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from grpclib import GRPCError
from grpclib.const import Status

from xlaserve.errors import InvalidBody
from xlaserve.grpc.http2.messages import PREFIX, PREFIX_BYTES, Problem

CONTENT_TYPES: Mapping[str, bool] = MappingProxyType(
    {
        "application/grpc-web": False,
        "application/grpc-web+proto": False,
        "application/grpc-web-text": True,
        "application/grpc-web-text+proto": True,
    }
)
"""Media type of a request -> whether it is text mode (base64)."""

_TRAILERS = 0x80
_QUANTUM = 4
_PADDED = re.compile(rb"=+")
_BREAKS = re.compile(r"[\r\n]+")


class Messages:
    """Iterates over the messages in a complete request body."""

    def __init__(self, body: memoryview, limit: int, *, streaming: bool) -> None:
        """`limit` is the maximum length of a message; only streaming requests have several."""
        self._rest = body
        self._limit = limit
        self._streaming = streaming
        self.length = 0
        """Length of the last message, as declared in its prefix."""

    def next(self) -> memoryview | Problem | None:
        """Return the next message or its problem; None at the end of the body.

        Raises GRPCError for a compressed message, which is not supported over gRPC-Web.
        """
        rest = self._rest
        if not rest:
            return None
        problem = self._problem(rest)
        if problem is not None:
            return problem
        if rest[0]:
            text = "compressed messages are not supported over gRPC-Web"
            raise GRPCError(Status.UNIMPLEMENTED, text)
        end = PREFIX_BYTES + self.length
        self._rest = rest[end:]
        return rest[PREFIX_BYTES:end]

    def _problem(self, rest: memoryview) -> Problem | None:
        if len(rest) < PREFIX_BYTES:
            return Problem.TRUNCATED
        flag, self.length = PREFIX.unpack_from(rest)
        if flag > 1:  # includes trailers, which clients must not send
            return Problem.FLAG
        if self.length > self._limit:
            return Problem.TOO_LARGE
        beyond = len(rest) - PREFIX_BYTES - self.length
        if beyond < 0:
            return Problem.TRUNCATED
        return Problem.SECOND if beyond and not self._streaming else None


def trailers(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return the trailers frame: an HTTP/1.1 header line for each field, in lower case."""
    lines = [f"{name.lower()}:{_BREAKS.sub(' ', value)}\r\n" for name, value in fields]
    block = "".join(lines).encode("latin-1", "replace")
    return PREFIX.pack(_TRAILERS, len(block)) + block


def to_text(data: bytes) -> bytes:
    """Encode a part of a body for text mode."""
    return b64encode(data)


def from_text(text: memoryview) -> memoryview:
    """Decode a text mode body: one or more base64 parts, each with its own padding.

    Raises InvalidBody for anything else, including white space and an incomplete group.
    """
    data = bytes(text)
    if len(data) % _QUANTUM:
        raise InvalidBody(
            f"expected base64 in groups of {_QUANTUM} characters (application/grpc-web-text), "
            f"got {len(data)} characters"
        )
    found, start = [], 0
    try:
        for padding in _PADDED.finditer(data):
            found.append(b64decode(data[start : padding.end()], validate=True))
            start = padding.end()
        found.append(b64decode(data[start:], validate=True))
    except ValueError as error:  # includes binascii.Error
        raise InvalidBody(f"expected base64 (application/grpc-web-text): {error}") from None
    return memoryview(b"".join(found))
