"""The body of gRPC-Web: messages, trailers after them, binary or base64.

PROTOCOL-WEB.md of gRPC: a frame whose flag has the highest bit set has the trailers; in text mode
each part of a body is base64 (RFC 4648 4), padded by itself.
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
"""Media types of requests, and whether they are text."""

_TRAILERS = 0x80
_QUANTUM = 4
_PADDED = re.compile(rb"=+")
_BREAKS = re.compile(r"[\r\n]+")


class Messages:
    """The messages in the body of a request, which has come whole."""

    def __init__(self, body: memoryview, limit: int, *, streaming: bool) -> None:
        """`limit` is that of a message; only a streaming request has several."""
        self._rest = body
        self._limit = limit
        self._streaming = streaming
        self.length = 0
        """Bytes that the message read last says to have."""

    def next(self) -> memoryview | Problem | None:
        """Return the next message or its problem; None at the end.

        Raises GRPCError for one that is compressed: nothing is, over gRPC-Web.
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
        if flag > 1:  # trailers of a client too: it has none
            return Problem.FLAG
        if self.length > self._limit:
            return Problem.TOO_LARGE
        beyond = len(rest) - PREFIX_BYTES - self.length
        if beyond < 0:
            return Problem.TRUNCATED
        return Problem.SECOND if beyond and not self._streaming else None


def trailers(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return the frame of the trailers: a line of HTTP/1.1 for each field, in lower case."""
    lines = [f"{name.lower()}:{_BREAKS.sub(' ', value)}\r\n" for name, value in fields]
    block = "".join(lines).encode("latin-1", "replace")
    return PREFIX.pack(_TRAILERS, len(block)) + block


def to_text(data: bytes) -> bytes:
    """Return a part of a body as text."""
    return b64encode(data)


def from_text(text: memoryview) -> memoryview:
    """Return what a text stands for: one base64, or several that are padded each by itself.

    Raises InvalidBody for anything else, also for white space and for an end within a quantum.
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
    except ValueError as error:  # binascii.Error is one
        raise InvalidBody(f"expected base64 (application/grpc-web-text): {error}") from None
    return memoryview(b"".join(found))
