"""Graceful shutdown of the HTTP server: started requests are answered, no connection is reset."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import uvloop
from support.gateway import serving_routes
from support.http import SECONDS, Answer, Connection, chunked, connect, message

from xlaserve.concurrency.host import HostThreads
from xlaserve.http.connection import bodies, drain
from xlaserve.http.connection.bodies import BodyLimits, BodyReader
from xlaserve.http.connection.held import Held
from xlaserve.http.connection.server import HttpLimits, HttpServer
from xlaserve.http.messages import (
    BINARY_TYPE,
    Answered,
    Begin,
    HttpRequest,
    HttpResponse,
    json_response,
)
from xlaserve.http.routing import Route, RouteTable
from xlaserve.http.threads import OffLoop
from xlaserve.net.ledger import Ledger
from xlaserve.serving.call import Headers, Operation, Peer

WAITING = 35
HELLO = message("GET", "/hello")
ECHO = message("POST", "/echo", body=b"abc")
HALF = ECHO[:-1]


async def hello(request: HttpRequest) -> HttpResponse:
    return json_response("hello")


async def echo(request: HttpRequest) -> HttpResponse:
    return HttpResponse(content_type=BINARY_TYPE, parts=[await request.read()])


def prepare(request: HttpRequest) -> Begin:
    def begin(
        body: memoryview, done: Answered, headers: Headers, peer: Peer, opened: int
    ) -> HttpResponse:
        return HttpResponse(content_type=BINARY_TYPE, parts=[bytes(body)])

    return begin


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[str, HttpServer]]:
    routes = RouteTable(
        [
            Route("GET", "/hello", Operation.PAGE, hello, "hello", "test"),
            Route("POST", "/echo", Operation.PAGE, echo, "echo", "test", prepare=prepare),
        ]
    )
    limits = HttpLimits(100, 1 << 14, 30.0, BodyLimits(1 << 20, 100, 30.0), 100)
    async with serving_routes(routes, limits, backlog=WAITING) as served:
        yield served


@pytest.fixture
async def served() -> AsyncIterator[tuple[str, HttpServer]]:
    async with serving() as served:
        yield served


async def last(client: Connection, answer: Answer) -> bool:
    """Check that an answer says `Connection: close`, and that the connection then closes."""
    return "close" == answer.headers.get("connection") and b"" == await client.ended()


async def until_drains(server: HttpServer) -> None:
    """Return once a drain limits the bodies: later data arrives during the drain."""
    async with asyncio.timeout(SECONDS):
        while not server._bodies._is_draining:
            await asyncio.sleep(0)


# --- the accept queue --------------------------------------------------------------------------


async def connections_in_the_accept_queue_are_served() -> None:
    async with serving() as (address, server):
        host, _, port = address.rpartition(":")
        waiting = []
        # The kernel accepts them; the event loop gets no chance to before the drain.
        for _ in range(WAITING):
            client = socket.create_connection((host, int(port)), timeout=SECONDS)
            client.sendall(HELLO)
            waiting.append(client)
        await server.drain(30)
        for client in waiting:
            with client:
                answer = client.recv(1 << 16)
                assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
                assert b"\r\nConnection: close\r\n" in answer
                assert b"" == client.recv(1 << 16)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=SECONDS)


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_connections_in_the_accept_queue_are_served(run: Run) -> None:
    run(connections_in_the_accept_queue_are_served())


# --- connections without a request -------------------------------------------------------------


@pytest.mark.parametrize("request_", [HELLO, ECHO], ids=["general", "fast"])
async def test_a_request_that_is_on_its_way_to_an_idle_connection_is_answered(
    served: tuple[str, HttpServer], request_: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RFC 9112, 9.6: with `Connection: close`, so that the client sends no further request."""
    monkeypatch.setattr(drain, "_IDLE_SECONDS", 30.0)
    address, server = served
    async with connect(address) as client:
        await client.ask(request_)
        draining = asyncio.ensure_future(server.drain(30))
        await asyncio.sleep(0)
        answer = await client.ask(request_)
        assert 200 == answer.status
        assert await last(client, answer)
        await draining


@pytest.mark.parametrize("sent", [b"", HELLO[:20], HELLO], ids=["nothing", "part", "a request"])
async def test_connections_without_a_request_are_closed_soon(
    served: tuple[str, HttpServer], sent: bytes
) -> None:
    address, server = served
    async with connect(address) as client:
        await client.send(sent)
        if sent == HELLO:
            await client.answer()
        else:
            async with connect(address) as other:
                await other.ask(HELLO)
        async with asyncio.timeout(SECONDS):
            await server.drain(3600)
        assert b"" == await client.ended()


async def test_requests_that_were_sent_ahead_are_not_begun(
    served: tuple[str, HttpServer],
) -> None:
    address, server = served
    async with connect(address) as client:
        await client.ask(ECHO)
        draining = asyncio.ensure_future(server.drain(30))
        await asyncio.sleep(0)
        await client.send(ECHO * 3)
        answer = await client.answer()
        with suppress(ConnectionError):
            assert await last(client, answer)
        await draining


# --- half a body -------------------------------------------------------------------------------


async def test_a_body_whose_time_is_over_does_not_hold_the_end(
    served: tuple[str, HttpServer],
) -> None:
    address, server = served
    loop = asyncio.get_running_loop()
    reader, between = server._bodies, loop.create_future()

    def end(timeout: asyncio.Timeout) -> None:
        try:
            reader.drain()
            reader.refuse()
        except RuntimeError as error:
            between.set_exception(error)
        else:
            between.set_result(timeout.expired())

    async with connect(address) as client:
        await client.send(HALF)
        async with asyncio.timeout(SECONDS):
            while not reader._timeouts:
                await asyncio.sleep(0)
        (timeout,) = reader._timeouts
        # It fires in the next loop iteration, and its task runs in the one after that.
        timeout.reschedule(loop.time() - 1)
        loop.call_soon(end, timeout)

        assert await between
        assert 503 == (await client.answer()).status


@pytest.mark.parametrize("is_known", [False, True], ids=["general", "fast"])
async def test_half_a_body_does_not_hold_the_end(
    served: tuple[str, HttpServer], monkeypatch: pytest.MonkeyPatch, *, is_known: bool
) -> None:
    monkeypatch.setattr(bodies, "_STALL_SECONDS", 0.1)
    address, server = served
    async with connect(address) as client:
        if is_known:
            await client.ask(ECHO)
        await client.send(HALF)
        async with connect(address) as other:
            await other.ask(HELLO)
        draining = asyncio.ensure_future(server.drain(3600))
        answer = await client.answer()
        assert (503, "the server is shutting down, try again") == (answer.status, answer.error)
        client.writer.close()
        async with asyncio.timeout(SECONDS):
            await draining


@pytest.mark.parametrize("sent", [1, len(ECHO) - 3, len(HALF)], ids=["head", "no body", "half"])
@pytest.mark.parametrize("is_known", [False, True], ids=["general", "fast"])
async def test_half_a_body_that_comes_during_the_drain_is_refused_and_not_cut(
    served: tuple[str, HttpServer],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_known: bool,
    sent: int,
) -> None:
    """However the server would have read the body, and long before the body timeout."""
    monkeypatch.setattr(bodies, "_STALL_SECONDS", 0.1)
    monkeypatch.setattr(drain, "_IDLE_SECONDS", 30.0)
    address, server = served
    async with connect(address) as client:
        await client.ask(ECHO if is_known else HELLO)
        draining = asyncio.ensure_future(server.drain(3600))
        await until_drains(server)
        await client.send(HALF[:sent])
        await client.send(HALF[sent:])
        answer = await client.answer()
        assert (503, "the server is shutting down, try again") == (answer.status, answer.error)
        assert "close" == answer.headers["connection"]
        client.writer.close()
        async with asyncio.timeout(SECONDS):
            await draining


@pytest.mark.parametrize("coding", ["length", "chunks"])
@pytest.mark.parametrize("is_known", [False, True], ids=["general", "fast"])
async def test_half_a_body_at_the_end_of_the_grace_is_refused_and_not_cut(
    served: tuple[str, HttpServer],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_known: bool,
    coding: str,
) -> None:
    """With a grace period shorter than the timeout for the next bytes of a body."""
    monkeypatch.setattr(bodies, "_STALL_SECONDS", 3600.0)
    address, server = served
    half = HALF
    if coding == "chunks":
        head = message("POST", "/echo", ("Transfer-Encoding", "chunked"), length=None)
        half = head + chunked(b"abc")[:8]
    async with connect(address) as client:
        if is_known:
            await client.ask(ECHO)
        await client.send(half)
        async with connect(address) as other:
            await other.ask(HELLO)
        draining = asyncio.ensure_future(server.drain(0.1))
        answer = await client.answer()
        assert (503, "the server is shutting down, try again") == (answer.status, answer.error)
        assert "close" == answer.headers["connection"]
        client.writer.close()
        async with asyncio.timeout(SECONDS):
            await draining


async def test_the_rest_of_a_body_that_comes_in_time_is_served(
    served: tuple[str, HttpServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_STALL_SECONDS", 30.0)
    address, server = served
    async with connect(address) as client:
        await client.send(HALF)
        async with connect(address) as other:
            await other.ask(HELLO)
        draining = asyncio.ensure_future(server.drain(30))
        await asyncio.sleep(0)
        answer = await client.ask(ECHO[-1:])
        assert (200, b"abc") == (answer.status, answer.body)
        assert await last(client, answer)
        await draining


class Arriving:
    """A body of which a piece arrives with each read; records how long the reader would wait."""

    def __init__(self, reader: BodyReader, length: int | None, pieces: int) -> None:
        self.body = self
        self.headers: dict[str, str] = {}
        self.waited_seconds = 0.0
        self.reader = reader
        self.length = length
        self.chunks = 0
        self.left = pieces
        self.waits: list[float] = []

    def let_body_come(self) -> None:
        pass

    async def read(self) -> bytes:
        (timeout,) = self.reader._timeouts
        when = timeout.when()
        assert when is not None
        loop = asyncio.get_running_loop()
        self.waits.append(when - loop.time())
        if self.left == 3:
            self.reader.drain()
        # Simulate the passage of time.
        timeout.reschedule(when - 0.25)
        self.left -= 1
        return b"x" if self.left >= 0 else b""


@pytest.mark.parametrize("length", [5, None], ids=["length", "chunks"])
async def test_each_piece_of_a_body_gives_the_next_one_its_time(length: int | None) -> None:
    """Only stalled uploads are refused: others have the whole grace period."""
    threads = HostThreads(1)
    limits = BodyLimits(1 << 20, 100, 30.0)
    reader = BodyReader(limits, OffLoop(threads), lambda size: np.empty(size, np.uint8))
    body, held = Arriving(reader, length, 5), Held(Ledger(1 << 30).open(), Mock())
    assert b"xxxxx" == await reader.read(body, held)  # type: ignore[arg-type]
    threads.close()

    assert all(wait > 20 for wait in body.waits[:3])
    assert len(body.waits) >= 5
    assert all(0.5 < wait <= bodies._STALL_SECONDS for wait in body.waits[3:])
    assert not reader._timeouts


async def test_a_body_in_chunks_that_stalls_is_refused(
    served: tuple[str, HttpServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_STALL_SECONDS", 0.1)
    address, server = served
    head = message("POST", "/echo", ("Transfer-Encoding", "chunked"), length=None)
    async with connect(address) as client:
        await client.send(head + chunked(b"abc")[:8])
        async with connect(address) as other:
            await other.ask(HELLO)
        draining = asyncio.ensure_future(server.drain(3600))
        answer = await client.answer()
        assert 503 == answer.status
        client.writer.close()
        async with asyncio.timeout(SECONDS):
            await draining
