"""Routes requests to the fast path or the general path, or rejects them."""

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
"""Chooses the route for a kind of request to one method: a fast path, or the general path."""


class FastPathsFactory(Protocol):
    """Creates a method's fast paths for a connection."""

    def __call__(self, general: Route, *, peer: Peer) -> FastPaths:
        """Create the fast paths; `general` is the route of the general path."""
        ...


class Router:
    """Finds the route for each kind of request on a connection.

    The route of a kind is cached, so headers whose values vary within a kind, such as timeouts,
    are checked for each request separately.
    """

    def __init__(
        self,
        connection: GrpclibConnection,
        methods: Mapping[str, Method],
        fast_paths: Mapping[str, FastPathsFactory],
    ) -> None:
        # Routes are created on demand, because most of ten thousand connections are idle.
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
        """Return the route for a kind, and set `kind.check` if varying headers need checks."""
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
    """Return a route that rejects the request if its headers are invalid, or None."""
    names = head.kind.places
    headers = ((name, value) for name in names if is_checked(name) for value in head.getall(name))
    refused = refusal(tuple(headers))
    return None if refused is None else Refused(*refused)


class Answer:
    """Answers a request that is not gRPC with an HTTP status, such as 415.

    If the request has a body, the response is sent after a short delay, so that stream errors in
    the request take precedence (RFC 9113 5.1, 8.1.1). It is sent before the end of the body, which
    the client may hold back until it gets a response (`expect: 100-continue`).
    """

    message_first = False
    placement: Placement | None = None

    def __init__(self, status: int, body: bytes, *more: tuple[str, str]) -> None:
        fields = [
            (":status", str(status)),
            ("content-type", "text/plain"),
            ("content-length", str(len(body))),
            ("cache-control", "no-store"),  # 405 is cacheable by default (RFC 9110 15.1)
            *more,
        ]
        self._block = encode_fields(fields)
        self._body = body

    def begin(self, stream: ServerStream) -> None:
        """Send the response if the request is complete, or after a short delay."""
        if stream.ended_by_client:
            self.send(stream)
        else:
            stream.call = _Moment(self, stream)

    def send(self, stream: ServerStream) -> None:
        """Send the response, without a body for HEAD (RFC 9110 9.3.2)."""
        if stream.head.method == "HEAD":
            stream.send_headers(self._block, end=True)
            return
        stream.send_headers(self._block)
        stream.send_data((self._body,), len(self._body), end=True)


class _Moment:
    """The pending call that sends an `Answer` after a short delay."""

    awaits_client = True

    def __init__(self, answer: Answer, stream: ServerStream) -> None:
        loop = asyncio.get_running_loop()
        self._later = loop.call_later(_MOMENT_SECONDS, self._end, answer, stream)

    def _end(self, answer: Answer, stream: ServerStream) -> None:
        stream.call = None
        if stream.open:
            answer.send(stream)

    def cancel(self, reason: str) -> None:
        """Cancel the timer: the stream has ended."""
        self._later.cancel()


class Refused:
    """Answers a request with an error status, without waiting for its message."""

    message_first = False
    placement: Placement | None = None

    def __init__(self, status: Status, text: str) -> None:
        self._block = encode_fields(
            (*refusal_headers(status, text), ("grpc-accept-encoding", ACCEPTED))
        )

    def begin(self, stream: ServerStream) -> None:
        """Send the error status."""
        stream.send_headers(self._block, end=True)


class NoMethod:
    """Answers requests for unknown methods; access checks come first, as for any call."""

    message_first = False
    placement: Placement | None = None

    def __init__(self, connection: GrpclibConnection) -> None:
        self._connection = connection

    def begin(self, stream: ServerStream) -> None:
        """Run the access checks, and send the resulting error status."""
        head = stream.head
        found = self._connection.handler.no_method(head.path, head, stream.deadline)
        Refused(*found).begin(stream)


class Malformed:
    """Resets the stream of a malformed request."""

    message_first = False
    placement: Placement | None = None

    def begin(self, stream: ServerStream) -> None:
        """Reset the stream with PROTOCOL_ERROR."""
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
"""Predicates for requests to reject, with the route that rejects them; the first match is used."""
