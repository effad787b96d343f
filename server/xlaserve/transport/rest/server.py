"""The HTTP server: aiohttp's parser and connections under our table of routes."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from xlaserve.core.server import NAME
from xlaserve.core.serving.call import Call, Headers, Operation, Peer
from xlaserve.core.serving.gates import Gates
from xlaserve.core.threads.host import HostThreads
from xlaserve.errors import CrossSiteRequest, ShuttingDown, XlaserveError
from xlaserve.tensors import Buffer
from xlaserve.transport.accepting import Acceptor, Handshakes
from xlaserve.transport.compression import deflate
from xlaserve.transport.endpoints import Listening
from xlaserve.transport.http2.limits import Shared
from xlaserve.transport.rest import compression
from xlaserve.transport.rest.bodies import BodyLimits, BodyReader
from xlaserve.transport.rest.calls import call_of
from xlaserve.transport.rest.connection import Beginning, Connection, Server
from xlaserve.transport.rest.drain import Drain
from xlaserve.transport.rest.edge import error_response, translate_errors
from xlaserve.transport.rest.exchange import Exchange, OtherProtocol
from xlaserve.transport.rest.headers import ReadHeaders
from xlaserve.transport.rest.heads import Heads, deciding
from xlaserve.transport.rest.held import read_bytes
from xlaserve.transport.rest.messages import JOINED_BYTES, HttpRequest, HttpResponse, HttpStream
from xlaserve.transport.rest.origins import Origins
from xlaserve.transport.rest.plans import Finish
from xlaserve.transport.rest.routing import Match, Route, RouteTable
from xlaserve.transport.rest.threads import OffLoop
from xlaserve.transport.rounds import Rounds
from xlaserve.transport.stall import LOOKS
from xlaserve.transport.tls import MakeContext

_COMPRESSED_BYTES = 1 << 10
"""Smaller answers do not become smaller by much."""
_WRITTEN_BYTES = 512 << 10
"""Bytes of an answer that are written before others have their turn."""
_LINGER_SECONDS = 2.0
"""Seconds the rest of an unwanted body is read, so that its sender sees the answer."""
_NOT_KEPT = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers with which proxies neither keep a stream nor collect it before they pass it on."""
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of connections."""

    max_connections: int
    max_header_bytes: int
    idle_seconds: float
    """Seconds a connection may be without a request, and take for the headers of one."""
    body: BodyLimits
    max_heads: int
    """Heads of requests that are known."""
    answer_seconds: float = 120.0
    """Seconds within which a client has to read some more of an answer that waits for it."""
    handshake_seconds: float = 5.0
    """Seconds a TLS handshake may take."""


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
        """`origins` are the hosts and origins of requests that are taken; None for all hosts.

        `other` is a protocol besides REST, which is served where pages of other origins may ask.
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
        self._looks: Rounds[RequestHandler] | None = None
        self._answer_seconds = limits.answer_seconds
        self._streams: set[Call] = set()
        """Calls whose answers are being sent part by part."""

    def listen(
        self,
        listening: Listening,
        tls: MakeContext | None = None,
        *,
        name: str = "http_endpoint",
    ) -> None:
        """Serve the connections of a socket that is bound and listens.

        `name` is the setting of the endpoint, as peers show it.
        """
        limits = self._limits
        self._server = server = Server(
            self._respond,
            listener=name,
            max_connections=limits.max_connections,
            heads=self._heads,
            body_seconds=limits.body.timeout_seconds,
            ledger=self._ledger,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=limits.idle_seconds,
            lingering_time=_LINGER_SECONDS,
            max_line_size=limits.max_header_bytes,
            max_field_size=limits.max_header_bytes,
            read_bufsize=read_bytes(self._ledger.limit),
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
        self._looks = Rounds(
            lambda: server.connections, self._look, seconds=lambda: self._answer_seconds / LOOKS
        )
        self._looks.begin()

    async def drain(self, seconds: float) -> None:
        """Take no new connections, let requests in flight end within the time, and stop."""
        drain, self._drain = self._drain, None
        if drain is not None:
            self._hurry()
            await drain.run(seconds)
        if self._looks is not None:
            self._looks.stop()

    def _hurry(self) -> None:
        """Give clients that do not read no longer than those that do not send."""
        self._answer_seconds = min(self._answer_seconds, self._limits.body.timeout_seconds)
        if self._looks is not None:
            self._looks.begin()

    def _look(self, connection: RequestHandler) -> None:
        """Cut a connection off whose client does not read."""
        if isinstance(connection, Connection) and connection.looks_without_progress() > LOOKS:
            connection.abort()

    @property
    def connections(self) -> int:
        """Return how many connections are open."""
        return self._server.admitted if self._server else 0

    @property
    def in_handshake(self) -> int:
        """Return how many accepted connections are none yet."""
        return self._acceptor.in_handshake if self._acceptor else 0

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        method, path = request.method, request.raw_path
        held = connection_of(request).held
        try:
            answer = await translate_errors(
                self._answer(method, path, request), method=method, path=path
            )
            if isinstance(answer, web.StreamResponse):
                return answer
            answer = held.begin_answer(answer, answer.size, method, path)
        finally:
            held.end_request()
        try:
            return await self._send(request, answer)
        finally:
            held.end_answer()

    async def _answer(
        self, method: str, path: str, request: web.BaseRequest
    ) -> HttpResponse | web.StreamResponse:
        connection = connection_of(request)
        beginning = connection.begin(request)
        headers = ReadHeaders(request.headers)
        preflight = self._origins.preflight(method, headers)
        if preflight is not None:
            return HttpResponse(HTTPStatus.NO_CONTENT, parts=[], headers=preflight)
        if self._other is not None and method == "POST":
            media_type = request.content_type.lower()
            if self._other.takes(media_type):
                exchange = self._exchange(request, headers, media_type, beginning)
                return await self._other.answer(exchange)
        match = self._routes.find(method, path)
        call = _call_of(match, headers, connection.peer)
        call.opened_ns = beginning.opened_ns
        with self._gates.passing(call):
            origin = self._origins.check(headers, connection.peer)
            if match.route is None:
                return _noted(call, _no_route(method, path, match.allowed))
            cross_site = call.headers.get("sec-fetch-site") == "cross-site"
            if cross_site and origin is None and method not in _SAFE_METHODS:
                raise CrossSiteRequest
            asked = self._asked(match.names, request, call, beginning)
            if beginning.head:
                self._learn(match.route, asked, request, beginning.head)
            answer = await match.route.handle(asked)
            if isinstance(answer, HttpStream):
                return await self._stream(request, call, answer)
            return _noted(call, answer)

    def _exchange(
        self,
        request: web.BaseRequest,
        headers: Headers,
        media_type: str,
        beginning: Beginning,
    ) -> Exchange:
        """Return a request of the other protocol; raises WrongHost, WrongOrigin and others."""
        connection = connection_of(request)
        origin = self._origins.check(headers, connection.peer)
        if origin is None and headers.get("sec-fetch-site") == "cross-site":
            raise CrossSiteRequest
        held, waited = connection.held, beginning.waited_seconds
        return Exchange(
            request,
            request.raw_path.partition("?")[0],
            media_type,
            connection.peer,
            held,
            partial(self._bodies.read, request, held, waited),
            {"Server": NAME, **self._origins.answer_headers(headers), **_NOT_KEPT},
            self._close_after,
        )

    def _asked(
        self, names: Mapping[str, str], request: web.BaseRequest, call: Call, beginning: Beginning
    ) -> HttpRequest:
        held, waited = connection_of(request).held, beginning.waited_seconds

        async def read() -> memoryview:
            body = await self._bodies.read(request, held, waited)
            if call.record is not None:
                call.record.received(len(body))
            return body

        return HttpRequest(names, request.query, request.headers, read, call, held.grow)

    def _learn(
        self, route: Route, asked: HttpRequest, request: web.BaseRequest, head: bytes
    ) -> None:
        """Have the fast path know the header block of a request, if it can answer such."""
        if route.prepare is None:
            return
        with suppress(XlaserveError):  # the handler raises it in its turn
            begin = route.prepare(replace(asked, headers=deciding(asked.headers)))
            if begin is not None:
                self._heads.learn(head, request, begin, self._finish(request))

    def _finish(self, request: web.BaseRequest) -> Finish | None:
        accepted = request.headers.get("Accept-Encoding", "")
        coding = compression.accepted_coding(accepted)
        return None if coding == compression.IDENTITY else partial(self._compress_later, coding)

    def _compress_later(
        self, coding: str, answer: HttpResponse
    ) -> "asyncio.Task[HttpResponse] | None":
        if not _to_compress(coding, answer):
            return None
        return asyncio.ensure_future(self._compress(coding, answer))

    async def _send(self, request: web.BaseRequest, answer: HttpResponse) -> web.StreamResponse:
        coding = compression.accepted_coding(request.headers.get("Accept-Encoding", ""))
        if _to_compress(coding, answer):
            answer = await self._compress(coding, answer)
        size, parts = answer.size, answer.parts
        headers = {
            "Content-Type": answer.content_type,
            "Server": NAME,
            **self._origins.answer_headers(ReadHeaders(request.headers)),
            **answer.headers,
        }
        if request.method == "HEAD" or size > JOINED_BYTES:
            stream = web.StreamResponse(status=answer.status, headers=headers)
            stream.content_length = size
            self._close_after(stream)
            await stream.prepare(request)
            if request.method != "HEAD":
                await _write_in_turns(stream, parts)
            return stream
        response = web.Response(status=answer.status, headers=headers, body=b"".join(parts))
        self._close_after(response)
        return response

    async def _stream(
        self, request: web.BaseRequest, call: Call, answer: HttpStream
    ) -> web.StreamResponse:
        """Send the parts of an answer, each when the client has read those before it."""
        headers = {
            "Content-Type": answer.content_type,
            "Server": NAME,
            **self._origins.answer_headers(ReadHeaders(request.headers)),
            **_NOT_KEPT,
        }
        response = web.StreamResponse(headers=headers)
        async with aclosing(answer.parts) as parts:
            part = await anext(parts, None)
            self._streams.add(call)
            try:
                self._close_after(response)
                await response.prepare(request)
                while part is not None:
                    if call.record is not None:
                        call.record.sent(len(part))
                    await response.write(part)
                    part = await anext(parts, None)
                self._close_after(response)
                await response.write_eof()
            finally:
                self._streams.discard(call)
        return response

    def _end_streams(self) -> None:
        """Tell the clients of answers that go on that the server ends."""
        for call in tuple(self._streams):
            call.fail(ShuttingDown())

    def _close_after(self, response: web.StreamResponse) -> None:
        """Say `Connection: close` in the last answers of a server that drains (RFC 9112, 9.6)."""
        if self._server is not None and self._server.is_draining:
            response.force_close()

    async def _compress(self, coding: str, answer: HttpResponse) -> HttpResponse:
        pack = partial(deflate, coding, answer.parts)
        body = await self._threads.run(answer.size, pack)
        headers = {**answer.headers, "Content-Encoding": coding, "Vary": "Accept-Encoding"}
        return HttpResponse(answer.status, answer.content_type, [body], headers)


def _noted(call: Call, answer: HttpResponse) -> HttpResponse:
    """Return an answer, of which whoever observes the call now knows status and size."""
    if call.record is not None:
        call.record.status = answer.status
        call.record.sent(answer.size)
    return answer


def _call_of(match: Match, headers: Headers, peer: Peer) -> Call:
    """Make the call of a request; what is nowhere is asked for as a page is."""
    route = match.route
    if route is None:
        return call_of(Operation.PAGE, match.names, headers, peer)
    if route.make_call is not None:
        return route.make_call(match.names, headers, peer)
    call = call_of(route.operation, match.names, headers, peer)
    call.api = route.api
    return call


def connection_of(request: web.BaseRequest) -> Connection:
    """Return the connection that a request came on."""
    connection = request.protocol
    assert isinstance(connection, Connection)
    return connection


def _to_compress(coding: str, answer: HttpResponse) -> bool:
    if coding == compression.IDENTITY or not answer.compressible:
        return False
    return answer.size >= _COMPRESSED_BYTES


def _no_route(method: str, path: str, allowed: Sequence[str]) -> HttpResponse:
    if allowed:
        text = f"{method} is not a method of this path, it has {', '.join(allowed)}"
        headers = {"Allow": ", ".join(allowed)}
        return error_response(text, HTTPStatus.METHOD_NOT_ALLOWED, headers, path=path)
    return error_response(f"there is nothing at '{path[:200]}'", HTTPStatus.NOT_FOUND, path=path)


async def _write_in_turns(stream: web.StreamResponse, parts: Iterable[Buffer]) -> None:
    """Write the parts of an answer, so that others have their turn in between.

    The system copies what it is given into the socket at once, and hands it to a client of the same
    machine: 10 MB kept the event loop for 4.5 ms.
    """
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), _WRITTEN_BYTES):
            if start:
                await asyncio.sleep(0)
            await stream.write(view[start : start + _WRITTEN_BYTES])
