"""The HTTP server: dispatches general-path requests by the route table."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus

from xlaserve.concurrency.host import HostThreads
from xlaserve.errors import CrossSiteRequest, ShuttingDown, XlaserveError
from xlaserve.errors.panics import ENDS
from xlaserve.grpc.http2.limits import Shared
from xlaserve.http import compression
from xlaserve.http.calls import call_of
from xlaserve.http.connection.bodies import BodyLimits, BodyReader
from xlaserve.http.connection.connection import Connection, Server
from xlaserve.http.connection.drain import Drain
from xlaserve.http.connection.exchange import Exchange, OtherProtocol
from xlaserve.http.connection.heads import Heads, deciding
from xlaserve.http.connection.origins import Origins
from xlaserve.http.connection.plans import Finish
from xlaserve.http.connection.request import Request
from xlaserve.http.connection.sending import Stream, joined, send
from xlaserve.http.edge import error_response, translate_errors
from xlaserve.http.headers import ReadHeaders
from xlaserve.http.hints import hint
from xlaserve.http.messages import HTML_TYPE, NO_STORE, HttpRequest, HttpResponse, HttpStream
from xlaserve.http.routing import Match, Route, RouteTable
from xlaserve.http.threads import INLINE_BYTES, OffLoop
from xlaserve.net.accepting import Acceptor, Handshakes
from xlaserve.net.compression import deflate_where_worth
from xlaserve.net.ledger import Account
from xlaserve.net.rounds import Rounds
from xlaserve.net.stall import CHECKS
from xlaserve.net.tls import MakeContext
from xlaserve.process.endpoints import Listening
from xlaserve.residence.server import NAME
from xlaserve.serving.call import Call, Headers, Operation, Peer
from xlaserve.serving.call_record import attach
from xlaserve.serving.gates import Gates

_COMPRESSED_BYTES = 1 << 10
"""Smaller responses are not worth compressing."""
_NOT_KEPT = {**NO_STORE, "X-Accel-Buffering": "no"}
"""Headers that prevent proxies from buffering or caching a stream."""
_SERVER = "*"
"""Target of an OPTIONS request for the server as a whole (RFC 9110, 9.3.7)."""
_VARIED = {"Vary": "Accept-Encoding"}
_VARYING_METHODS = frozenset({"GET", "HEAD"})
"""Methods with cacheable responses (RFC 9111, 3), which need `Vary`."""
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of the server and its connections."""

    max_connections: int
    max_header_bytes: int
    idle_seconds: float
    """Seconds for which a connection may be idle, or may take to send a header block."""
    body: BodyLimits
    max_heads: int
    """Maximum number of cached header blocks."""
    answer_seconds: float = 120.0
    """Seconds after which a client that does not read its response is disconnected."""
    handshake_seconds: float = 5.0
    compress_answers: bool = True
    """Whether to compress responses for clients that accept it."""


class HttpServer:
    """Serves a table of routes."""

    def __init__(
        self,
        routes: RouteTable,
        limits: HttpLimits,
        threads: HostThreads,
        shared: Shared,
        gates: Gates,
        *,
        origins: Origins | None = None,
        other: OtherProtocol | None = None,
    ) -> None:
        """`origins` are the accepted hosts and origins; None accepts all hosts.

        `other` is a further protocol on this port; it is served only if other origins are allowed.
        """
        self._gates = gates
        self._origins = origins or Origins()
        self._other = other if self._origins.are_open else None
        self._ledger = shared.ledger
        self._routes = routes
        self._limits = limits
        self._threads = OffLoop(threads)
        self._bodies = BodyReader(limits.body, self._threads, shared.memory.take)
        self._heads = Heads(limits.max_heads, limits.body.max_bytes)
        self._server: Server | None = None
        self._acceptor: Acceptor | None = None
        self._drain: Drain | None = None
        self._progress_checks: Rounds[Connection] | None = None
        self._answer_seconds = limits.answer_seconds
        self._streams: set[Call] = set()
        """Calls whose responses are being streamed."""

    def listen(
        self,
        listening: Listening,
        tls: MakeContext | None = None,
        *,
        name: str = "http_endpoint",
    ) -> None:
        """Serve connections on a bound, listening socket.

        `name` is the setting that defines the endpoint, as peers show it.
        """
        limits = self._limits
        self._server = server = Server(
            self._respond,
            listener=name,
            max_connections=limits.max_connections,
            max_header_bytes=limits.max_header_bytes,
            idle_seconds=limits.idle_seconds,
            heads=self._heads,
            body_seconds=limits.body.timeout_seconds,
            ledger=self._ledger,
        )
        acceptor = Acceptor(
            listening,
            server,
            name=name,
            handshakes=None if tls is None else Handshakes(tls, limits.handshake_seconds),
            is_full=lambda: self.connections + acceptor.in_handshake >= limits.max_connections,
        )
        self._acceptor = acceptor
        self._drain = Drain(server, self._bodies, self._end_streams, acceptor)
        self._progress_checks = Rounds(
            lambda: tuple(server.connections),
            self._check_progress,
            seconds=lambda: self._answer_seconds / CHECKS,
        )
        self._progress_checks.begin()

    async def drain(self, seconds: float) -> None:
        """Stop accepting connections, finish requests in flight within `seconds`, and stop."""
        drain, self._drain = self._drain, None
        if drain is not None:
            self._shorten_answer_timeout()
            await drain.run(seconds)
        if self._progress_checks is not None:
            self._progress_checks.stop()

    def _shorten_answer_timeout(self) -> None:
        """Limit the response timeout to the body timeout, for clients that do not read."""
        self._answer_seconds = min(self._answer_seconds, self._limits.body.timeout_seconds)
        if self._progress_checks is not None:
            self._progress_checks.begin()

    def _check_progress(self, connection: Connection) -> None:
        """Abort a connection whose client does not read."""
        if connection.checks_without_progress() > CHECKS:
            connection.abort()

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        return self._server.admitted if self._server else 0

    @property
    def in_handshake(self) -> int:
        """Return the number of connections in their TLS handshake."""
        return self._acceptor.in_handshake if self._acceptor else 0

    async def _respond(self, request: Request) -> None:
        """Answer a general-path request; raises ConnectionError if its client has disconnected."""
        method, path, held = request.method, request.target, request.connection.held
        try:
            shape_of = self._routes.shape_of_errors
            answer = await translate_errors(
                self._answer(request), method=method, path=path, shape_of=shape_of
            )
            if answer is None:
                return
            if request.is_begun:
                # Part of a response was already sent, so the error cannot be reported.
                request.connection.abort()
                return
        finally:
            held.end_request()
        try:
            await self._send(request, answer)
        finally:
            held.end_answer()

    async def _answer(self, request: Request) -> HttpResponse | None:
        """Return the response to a request, or None if it was sent already."""
        method, path, connection = request.method, request.target, request.connection
        headers = ReadHeaders(request.headers)
        preflight = self._origins.preflight(method, headers)
        if preflight is not None:
            return HttpResponse(HTTPStatus.NO_CONTENT, parts=[], headers=preflight)
        if self._other is not None and method == "POST" and self._other.takes(request.media_type):
            await self._other.answer(self._exchange(request, headers))
            return None
        match = self._routes.find(method, path)
        call = _call_of(match, headers, connection.peer)
        call.opened_ns = request.opened_ns
        with _counted(call), self._gates.passing(call):
            origin = self._origins.check(headers, call.peer)
            if match.route is None:
                unknown = _not_kept(self._no_route(method, path, match.allowed))
                return await self._begun(call, request, unknown)
            cross_site = call.headers.get("sec-fetch-site") == "cross-site"
            if cross_site and origin is None and method not in _SAFE_METHODS:
                raise CrossSiteRequest
            elsewhere = _elsewhere(match.route, path)
            if elsewhere is not None:
                return await self._begun(call, request, _not_kept(elsewhere))
            parsed = self._http_request(match.names, request, call)
            self._learn(match.route, parsed, request)
            answer = await match.route.handle(parsed)
            if isinstance(answer, HttpStream):
                await self._stream(request, call, answer)
                return None
            if match.route.prepare is None:
                # Not for routes with a fast path: those are POST routes, whose responses caches do
                # not store by default, and the fast path does not write the header.
                answer = _not_kept(answer)
            return await self._begun(call, request, answer)

    async def _begun(self, call: Call, request: Request, answer: HttpResponse) -> HttpResponse:
        """Compress a response if the client accepts it, charge its memory, and record it.

        Raises BudgetExhausted, which then becomes the result of the call.
        """
        size, written = answer.size, answer
        answer = await self._packed(request, answer)
        request.connection.held.begin_part(size if answer is written else answer.size)
        if call.record is not None:
            call.record.status = answer.status
            call.record.sent(size)
        return answer

    def _no_route(self, method: str, path: str, allowed: Sequence[str]) -> HttpResponse:
        """Answer 404, 405 with the allowed methods, or an OPTIONS request."""
        if method == "OPTIONS" and (allowed or path == _SERVER):
            methods = allowed or (route.method for route in self._routes.routes)
            return HttpResponse(HTTPStatus.NO_CONTENT, headers=_allow(methods))
        shape = self._routes.shape_of_errors(path)
        if allowed:
            advice = hint(path, is_there=True)
            text = f"{method} is not allowed for this path, expected {', '.join(allowed)}{advice}"
            return error_response(text, HTTPStatus.METHOD_NOT_ALLOWED, _allow(allowed), shape=shape)
        return error_response(
            f"there is nothing at '{path[:200]}'{hint(path, is_there=False)}",
            HTTPStatus.NOT_FOUND,
            shape=shape,
        )

    def _exchange(self, request: Request, headers: Headers) -> Exchange:
        """Return the other protocol's request after checking its host and origin.

        Raises WrongHost, WrongOrigin or CrossSiteRequest.
        """
        connection = request.connection
        peer = self._gates.client_of(connection.peer, headers)
        origin = self._origins.check(headers, peer)
        if origin is None and headers.get("sec-fetch-site") == "cross-site":
            raise CrossSiteRequest
        return Exchange(
            request,
            request.target.partition("?")[0],
            request.media_type,
            peer,
            connection.held,
            partial(self._bodies.read, request, connection.held),
            {"Server": NAME, **self._origins.answer_headers(headers), **_NOT_KEPT},
        )

    def _http_request(self, names: Mapping[str, str], request: Request, call: Call) -> HttpRequest:
        held = request.connection.held

        async def read() -> memoryview:
            body = await self._bodies.read(request, held)
            if call.record is not None:
                call.record.received(len(body))
            return body

        return HttpRequest(names, request.query, request.headers, read, call, held.grow)

    def _learn(self, route: Route, parsed: HttpRequest, request: Request) -> None:
        """Cache the header block of a request for the fast path, if its route supports it."""
        if route.prepare is None:
            return
        with suppress(XlaserveError):  # the handler raises the same error
            begin = route.prepare(replace(parsed, headers=deciding(parsed.headers)))
            if begin is not None:
                self._heads.learn(request, begin, self._finish(request))

    def _finish(self, request: Request) -> Finish | None:
        accepted = request.headers.get("Accept-Encoding", "")
        coding = self._coding(accepted) if accepted else compression.IDENTITY
        return None if coding == compression.IDENTITY else partial(self._compress_later, coding)

    def _coding(self, accepted: str) -> str:
        compresses = self._limits.compress_answers
        return compression.accepted_coding(accepted) if compresses else compression.IDENTITY

    def _compress_later(
        self, coding: str, answer: HttpResponse, account: Account
    ) -> "asyncio.Task[HttpResponse] | None":
        if not _to_compress(coding, answer):
            return None
        return asyncio.ensure_future(self._compress(coding, answer, account))

    async def _packed(self, request: Request, answer: HttpResponse) -> HttpResponse:
        """Return a response, compressed if the client accepts it."""
        accepted = request.headers.get("Accept-Encoding", "")
        if not accepted or not _to_compress(coding := self._coding(accepted), answer):
            return answer
        return await self._compress(coding, answer, request.connection.held.account)

    async def _send(self, request: Request, answer: HttpResponse) -> None:
        headers = self._origins.answer_headers(ReadHeaders(request.headers))
        if request.method in _VARYING_METHODS and answer.compressible:
            headers = joined(headers, _VARIED)
        await send(request, answer, headers)

    async def _stream(self, request: Request, call: Call, answer: HttpStream) -> None:
        """Send the parts of a streamed response, each after the client has read the last."""
        headers = {
            "Content-Type": answer.content_type,
            "Server": NAME,
            **self._origins.answer_headers(ReadHeaders(request.headers)),
            **_NOT_KEPT,
        }
        stream = Stream(request, headers)
        async with aclosing(answer.parts) as parts:
            part = await anext(parts, None)
            self._streams.add(call)
            try:
                stream.begin()
                while part is not None:
                    if call.record is not None:
                        call.record.sent(len(part))
                    await stream.write(part)
                    part = await anext(parts, None)
                stream.end()
            finally:
                self._streams.discard(call)

    def _end_streams(self) -> None:
        """Send an error to the clients of running streams, because the server is stopping."""
        for call in tuple(self._streams):
            call.fail(ShuttingDown())

    async def _compress(self, coding: str, answer: HttpResponse, account: Account) -> HttpResponse:
        """Compress a response; return it unchanged if that saves little or memory is short."""
        size = answer.size
        pack = partial(deflate_where_worth, coding, answer.parts, size)
        if size <= INLINE_BYTES:
            body = pack()
        elif account.spare(2 * size):
            try:
                body = await self._threads.run(size, pack)
            finally:
                account.release(2 * size)
        else:
            return answer
        if body is None:
            return answer
        headers = joined(answer.headers, {"Content-Encoding": coding}, _VARIED)
        return HttpResponse(answer.status, answer.content_type, [body], headers)


@contextmanager
def _counted(call: Call) -> Iterator[None]:
    """Attach an exception of the block to the call's record, so that its response is counted."""
    try:
        yield
    except ENDS:
        raise
    except BaseException as error:
        attach(call.record, error)
        raise


def _not_kept(answer: HttpResponse) -> HttpResponse:
    """Forbid caching of a response, unless it has its own Cache-Control."""
    if "Cache-Control" in answer.headers:
        return answer
    return HttpResponse(
        answer.status,
        answer.content_type,
        answer.parts,
        joined(NO_STORE, answer.headers),
        answer.compressible,
    )


def _call_of(match: Match, headers: Headers, peer: Peer) -> Call:
    """Create the call of a request; an unknown path counts as a page."""
    route = match.route
    if route is None:
        return call_of(Operation.PAGE, match.names, headers, peer)
    if route.make_call is not None:
        call = route.make_call(match.names, headers, peer)
    else:
        call = call_of(route.operation, match.names, headers, peer)
        call.api = route.api
    call.method = route.name
    return call


def _to_compress(coding: str, answer: HttpResponse) -> bool:
    if coding == compression.IDENTITY or not answer.compressible:
        return False
    return answer.size >= _COMPRESSED_BYTES


def _allow(methods: Iterable[str]) -> Mapping[str, str]:
    """Return the `Allow` header for the given methods."""
    every = {*methods, "OPTIONS"}
    return {"Allow": ", ".join(sorted({*every, "HEAD"} if "GET" in every else every))}


def _elsewhere(route: Route, target: str) -> HttpResponse | None:
    """Redirect a page's URL with a trailing slash to the one where its relative links work.

    The redirect is relative because a proxy may have added a prefix to the path.
    """
    path, mark, query = target.partition("?")
    name = path.rstrip("/").rpartition("/")[2]
    if not (path.endswith("/") and name and HTML_TYPE in route.answer.media_types):
        return None
    headers = {"Location": f"../{name}{mark}{query}"}
    return HttpResponse(
        HTTPStatus.PERMANENT_REDIRECT, parts=[], headers=headers, compressible=False
    )
