"""The HTTP server: aiohttp's parser and connections under our table of routes."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import cast

import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from xlaserve.core.server import NAME
from xlaserve.errors import CrossSiteRequest
from xlaserve.tensors import Buffer
from xlaserve.transport.rest import compression
from xlaserve.transport.rest.bodies import BodyLimits, BodyReader
from xlaserve.transport.rest.edge import error_response, translate_errors
from xlaserve.transport.rest.messages import HttpRequest, HttpResponse
from xlaserve.transport.rest.routing import RouteTable
from xlaserve.transport.rest.threads import OffLoop, Submit

_JOINED_BYTES = 64 << 10
"""Answers up to this size leave in one write; the pieces of larger ones are not copied."""
_COMPRESSED_BYTES = 1 << 10
"""Smaller answers do not become smaller by much."""
_LINGER_SECONDS = 2.0
"""How long the rest of a body that nobody wants is read, so that its sender sees the answer."""
_READ_BYTES = 256 << 10
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_FULL = b'{"error":"too many HTTP connections are open (max_http_connections), try again"}'

_log = structlog.get_logger("http")


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What connections may cost."""

    max_connections: int
    max_header_bytes: int
    idle_seconds: float
    """How long a connection may be without a request, and take for the headers of one."""
    body: BodyLimits


class HttpServer:
    """Serves a table of routes."""

    def __init__(self, routes: RouteTable, limits: HttpLimits, submit: Submit) -> None:
        self._routes = routes
        self._limits = limits
        self._threads = OffLoop(submit)
        self._bodies = BodyReader(limits.body, self._threads)
        self._runner: web.ServerRunner | None = None

    async def listen(self, listening: socket.socket) -> None:
        """Serve the connections of a socket that is bound and listens."""
        limits = self._limits
        server = _Server(
            self._respond,
            max_connections=limits.max_connections,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=limits.idle_seconds,
            lingering_time=_LINGER_SECONDS,
            max_line_size=limits.max_header_bytes,
            max_field_size=limits.max_header_bytes,
            read_bufsize=_READ_BYTES,
        )
        self._runner = web.ServerRunner(server, handle_signals=False)
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()

    async def drain(self, seconds: float) -> None:
        """Take no new connections, let requests in progress end within the time, and stop."""
        if self._runner is None:
            return
        self._runner._shutdown_timeout = seconds
        await self._runner.cleanup()
        self._runner = None

    @property
    def connections(self) -> int:
        """Return how many connections are open."""
        server = self._runner.server if self._runner else None
        return len(server.connections) if server else 0

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        method, path = request.method, request.raw_path
        answer = await translate_errors(
            self._answer(method, path, request), method=method, path=path
        )
        return await self._send(request, answer)

    async def _answer(self, method: str, path: str, request: web.BaseRequest) -> HttpResponse:
        match = self._routes.find(method, path)
        if match.route is None:
            return _no_route(method, path, match.allowed)
        if method not in _SAFE_METHODS and request.headers.get("Sec-Fetch-Site") == "cross-site":
            raise CrossSiteRequest

        async def read() -> memoryview:
            return await self._bodies.read(request)

        return await match.route.handle(
            HttpRequest(match.names, request.query, request.headers, read)
        )

    async def _send(self, request: web.BaseRequest, answer: HttpResponse) -> web.StreamResponse:
        parts, headers = await self._compressed(request, answer)
        size = sum(memoryview(part).nbytes for part in parts)
        headers = {"Content-Type": answer.content_type, "Server": NAME} | headers
        if request.method == "HEAD" or size > _JOINED_BYTES:
            response = web.StreamResponse(status=answer.status, headers=headers)
            response.content_length = size
            await response.prepare(request)
            if request.method != "HEAD":
                for part in parts:
                    await response.write(part)
            return response
        return web.Response(status=answer.status, headers=headers, body=b"".join(parts))

    async def _compressed(
        self, request: web.BaseRequest, answer: HttpResponse
    ) -> tuple[list[Buffer], dict[str, str]]:
        parts, headers = list(answer.parts), dict(answer.headers)
        accepted = request.headers.get("Accept-Encoding")
        if not accepted or not answer.compressible:
            return parts, headers
        size = sum(memoryview(part).nbytes for part in parts)
        coding = compression.accepted_coding(accepted)
        if size < _COMPRESSED_BYTES or coding == compression.IDENTITY:
            return parts, headers
        headers |= {"Content-Encoding": coding, "Vary": "Accept-Encoding"}
        pack = partial(compression.deflate, coding, parts)
        return [await self._threads.run(size, pack)], headers


def _no_route(method: str, path: str, allowed: Sequence[str]) -> HttpResponse:
    if allowed:
        text = f"{method} is not a method of this path, it has {', '.join(allowed)}"
        return error_response(text, HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": ", ".join(allowed)})
    return error_response(f"there is nothing at '{path[:200]}'", HTTPStatus.NOT_FOUND)


class _Server(web.Server):
    """Makes a protocol for each connection, up to a limit."""

    def __init__(self, *arguments: object, max_connections: int, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.max_connections = max_connections

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    """A connection whose faults are answered as `{"error": text}` too."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self._manager
        assert isinstance(server, _Server)
        transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        if len(server.connections) < server.max_connections:
            super().connection_made(transport)
            return
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(_FULL)}\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode() + _FULL)
        transport.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            _log.error("unexpected exception", exc_info=exc)
        text = f"the request cannot be read: {message or exc}" if status < 500 else "internal error"
        answer = error_response(text, HTTPStatus(status))
        response = web.Response(
            status=status,
            body=b"".join(answer.parts),
            headers={"Content-Type": answer.content_type, "Server": NAME},
        )
        response.force_close()
        return response
