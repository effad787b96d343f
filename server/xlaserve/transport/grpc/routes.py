"""Which way a request goes: to the short lane, to grpclib, or back with a word."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from grpclib.const import Status

from xlaserve.transport.grpc.compression import ACCEPTED
from xlaserve.transport.grpc.grpclib_stream import GrpclibConnection, GrpclibRoute
from xlaserve.transport.grpc.methods import Method
from xlaserve.transport.grpc.request_headers import NOT_FOUND, refusal, refusal_headers
from xlaserve.transport.http2.frames import ErrorCode
from xlaserve.transport.http2.headers import Head, encode_fields
from xlaserve.transport.http2.messages import Placement
from xlaserve.transport.http2.stream import Route, ServerStream

CONTENT_TYPES = frozenset(("application/grpc", "application/grpc+proto"))
"""The content types of requests of gRPC."""
_HINT = b"This port speaks gRPC (HTTP/2, content-type application/grpc); REST is on another.\n"

Lanes: TypeAlias = Callable[[Sequence[tuple[str, str]]], Route]
"""Finds a quicker way for the requests of one method, by their headers."""

LanesFactory: TypeAlias = Callable[[Route], Lanes]
"""Makes the lanes of a connection, over the route that its requests take otherwise."""


class Router:
    """Finds the route of each head of a connection; the same heads are asked for once."""

    def __init__(
        self,
        connection: GrpclibConnection,
        methods: Mapping[str, Method],
        lanes: Mapping[str, LanesFactory],
    ) -> None:
        self._methods = methods
        self._streaming = GrpclibRoute(connection, streaming=True)
        self._unary = GrpclibRoute(connection, streaming=False)
        self._lanes = {path: make(self._unary) for path, make in lanes.items()}

    def __call__(self, head: Head[Route]) -> Route:
        """Return the route of the requests that have a head."""
        fields = dict(head.fields)
        for wrong, route in _REFUSALS:
            if wrong(head, fields):
                return route
        method = self._methods.get(head.path)
        refused = refusal(head.fields)
        if method is None or refused is not None:
            return Refused(*(refused or NOT_FOUND))
        if method.handler.cardinality.client_streaming:
            return self._streaming
        lanes = self._lanes.get(head.path)
        return self._unary if lanes is None else lanes(head.fields)


class Answer:
    """Answers with words of HTTP, for who is at the wrong port."""

    message_first = False
    place: Placement | None = None

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        fields = [
            (":status", str(status)),
            ("content-type", content_type),
            ("content-length", str(len(body))),
        ]
        self._block = encode_fields(fields)
        self._body = body

    def begin(self, stream: ServerStream) -> None:
        """Send the answer."""
        stream.send_headers(self._block)
        stream.send_data((self._body,), len(self._body), end=True)


class Refused:
    """Answers a request with a status, before its message has come."""

    message_first = False
    place: Placement | None = None

    def __init__(self, status: Status, text: str) -> None:
        self._block = encode_fields(
            (*refusal_headers(status, text), ("grpc-accept-encoding", ACCEPTED))
        )

    def begin(self, stream: ServerStream) -> None:
        """Send the status."""
        stream.send_headers(self._block, end=True)


class Malformed:
    """Ends the stream of a request that is not one of gRPC."""

    message_first = False
    place: Placement | None = None

    def begin(self, stream: ServerStream) -> None:
        """Reset the stream."""
        stream.reset(ErrorCode.PROTOCOL_ERROR)


_REFUSALS: tuple[tuple[Callable[[Head[Route], Mapping[str, str]], bool], Route], ...] = (
    (
        lambda head, _: head.too_large,
        Answer(431, "text/plain", b"The headers are too large (max_header_bytes).\n"),
    ),
    (lambda head, _: head.method != "POST", Answer(405, "text/plain", _HINT)),
    (
        lambda _, fields: fields.get("content-type") not in CONTENT_TYPES,
        Answer(415, "text/plain", _HINT),
    ),
    (lambda _, fields: "te" not in fields, Malformed()),
)
"""What is no request of gRPC, and where it goes; the first that fits counts."""
