"""Routing of requests: to the fast path, to grpclib, or refused with a text."""

import asyncio
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Protocol, TypeAlias

from grpclib.const import Status

from xlaserve.grpc.compression import ACCEPTED
from xlaserve.grpc.engine.grpclib_stream import GrpclibConnection, GrpclibRoute
from xlaserve.grpc.http2.frames import ErrorCode
from xlaserve.grpc.http2.headers import Head, RequestKind, encode_fields
from xlaserve.grpc.http2.messages import Placement
from xlaserve.grpc.http2.stream import Route, ServerStream
from xlaserve.grpc.http2.timeout import TIMEOUT
from xlaserve.grpc.methods import Method
from xlaserve.grpc.request_headers import (
    NO_SECONDS,
    is_checked,
    is_grpc,
    refusal,
    refusal_headers,
)
from xlaserve.serving.call import Peer

_HINT = b"This port speaks gRPC (HTTP/2, content-type application/grpc); REST is on another.\n"
_MOMENT_SECONDS = 0.1

FastPaths: TypeAlias = Callable[[RequestKind[Route]], Route]
"""Finds the fast path for the requests of one method by the names of their headers."""


class FastPathsFactory(Protocol):
    """Makes the fast paths of a connection."""

    def __call__(self, general: Route, *, peer: Peer) -> FastPaths:
        """Return the fast paths; `general` is the route of the general path."""
        ...


class Router:
    """Finds the route of each kind of request of a connection.

    A kind knows no header that varies. What such headers say is checked for each request.
    """

    def __init__(
        self,
        connection: GrpclibConnection,
        methods: Mapping[str, Method],
        fast_paths: Mapping[str, FastPathsFactory],
    ) -> None:
        # The routes are made with the first request: most of ten thousand connections are silent.
        self._methods = methods
        self._connection = connection
        self._make_fast_paths = fast_paths

    @cached_property
    def _no_method(self) -> Route:
        return NoMethod(self._connection)

    @cached_property
    def _streaming(self) -> Route:
        return GrpclibRoute(self._connection, streaming=True)

    @cached_property
    def _unary(self) -> Route:
        return GrpclibRoute(self._connection, streaming=False)

    @cached_property
    def _fast_paths(self) -> Mapping[str, FastPaths]:
        return {
            path: make(self._unary, peer=self._connection.handler.peer)
            for path, make in self._make_fast_paths.items()
        }

    def __call__(self, kind: RequestKind[Route]) -> Route:
        """Return the route of the requests of a kind, and have them checked where need be."""
        for wrong, route in _REFUSALS:
            if wrong(kind):
                return route
        checked = [name for name in kind.places if is_checked(name)]
        if checked:
            kind.check = _refused
            if checked == [TIMEOUT] and len(kind.places[TIMEOUT]) == 1:
                kind.unchecked_seconds = NO_SECONDS
        method = self._methods.get(kind.path)
        if method is None:
            return self._no_method
        if method.handler.cardinality.client_streaming:
            return self._streaming
        fast_paths = self._fast_paths.get(kind.path)
        return self._unary if fast_paths is None else fast_paths(kind)


def _refused(head: Head[Route]) -> Route | None:
    """Return the route of an invalid header block; None for a valid one."""
    names = head.kind.places
    headers = ((name, value) for name in names if is_checked(name) for value in head.getall(name))
    refused = refusal(tuple(headers))
    return None if refused is None else Refused(*refused)


class Answer:
    """Answers a client at the wrong port in terms of HTTP, in a moment or with its whole request.

    What is wrong with its frames is told first, as of any other request (RFC 9113 5.1, 8.1.1). But
    no body is waited for: its client may wait with it for a word of the server (`expect`).
    """

    message_first = False
    placement: Placement | None = None

    def __init__(self, status: int, body: bytes, *more: tuple[str, str]) -> None:
        fields = [
            (":status", str(status)),
            ("content-type", "text/plain"),
            ("content-length", str(len(body))),
            ("cache-control", "no-store"),  # caches keep 405 unasked (RFC 9110, 15.1)
            *more,
        ]
        self._block = encode_fields(fields)
        self._body = body

    def begin(self, stream: ServerStream) -> None:
        """Send the answer, at once where nothing more can come of the request."""
        if stream.ended_by_client:
            self.send(stream)
        else:
            stream.call = _Moment(self, stream)

    def send(self, stream: ServerStream) -> None:
        """Send the answer, to HEAD without its body (RFC 9110, 9.3.2)."""
        if stream.head.method == "HEAD":
            stream.send_headers(self._block, end=True)
            return
        stream.send_headers(self._block)
        stream.send_data((self._body,), len(self._body), end=True)


class _Moment:
    """Grace time for a client at the wrong port."""

    awaits_client = True

    def __init__(self, answer: Answer, stream: ServerStream) -> None:
        loop = asyncio.get_running_loop()
        self._later = loop.call_later(_MOMENT_SECONDS, self._end, answer, stream)

    def _end(self, answer: Answer, stream: ServerStream) -> None:
        stream.call = None
        if stream.open:
            answer.send(stream)

    def cancel(self, reason: str) -> None:
        """Send nothing: the stream has ended."""
        self._later.cancel()


class Refused:
    """Answers a request with a status, before its message has come."""

    message_first = False
    placement: Placement | None = None

    def __init__(self, status: Status, text: str) -> None:
        self._block = encode_fields(
            (*refusal_headers(status, text), ("grpc-accept-encoding", ACCEPTED))
        )

    def begin(self, stream: ServerStream) -> None:
        """Send the status."""
        stream.send_headers(self._block, end=True)


class NoMethod:
    """Answers requests for unknown methods, each as a call."""

    message_first = False
    placement: Placement | None = None

    def __init__(self, connection: GrpclibConnection) -> None:
        self._connection = connection

    def begin(self, stream: ServerStream) -> None:
        """Let the call pass the gates, and send the status."""
        head = stream.head
        found = self._connection.handler.no_method(head.path, head, stream.deadline)
        Refused(*found).begin(stream)


class Malformed:
    """Ends the stream of a malformed request."""

    message_first = False
    placement: Placement | None = None

    def begin(self, stream: ServerStream) -> None:
        """Reset the stream."""
        stream.reset(ErrorCode.PROTOCOL_ERROR)


_REFUSALS: tuple[tuple[Callable[[RequestKind[Route]], bool], Route], ...] = (
    (
        lambda kind: kind.too_large and is_grpc(kind.get("content-type")),
        Refused(Status.RESOURCE_EXHAUSTED, "the headers are too large (max_header_bytes)"),
    ),
    (
        lambda kind: kind.too_large,
        Answer(431, b"The headers are too large (max_header_bytes).\n"),
    ),
    (lambda kind: kind.method != "POST", Answer(405, _HINT, ("allow", "POST"))),
    (lambda kind: not is_grpc(kind.get("content-type")), Answer(415, _HINT)),
    (lambda kind: "te" not in kind.places, Malformed()),
)
"""Checks for requests that are not gRPC, and their routes; the first match counts."""
