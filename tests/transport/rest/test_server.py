"""The HTTP server: limits, client errors, and shutdown."""

import asyncio
import gzip
import os
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.gateway import serving_routes
from support.http import Answer, ask, chunked, connect, message

from xlaserve.errors import ModelNotFound
from xlaserve.http.connection.bodies import BodyLimits
from xlaserve.http.connection.connection import Connection
from xlaserve.http.connection.server import HttpLimits, HttpServer
from xlaserve.http.messages import BINARY_TYPE, HttpRequest, HttpResponse, json_response
from xlaserve.http.routing import Route, RouteTable
from xlaserve.serving.call import Operation

MAX_BYTES = 1 << 20
CHUNKS = ("Transfer-Encoding", "chunked")
GATE = "/gate"

PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
UNPACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.decompress,
    "deflate": zlib.decompress,
}


class World:
    """State that the handlers share with the test."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.gate = asyncio.Event()
        self.cancelled = asyncio.Event()


async def echo(request: HttpRequest) -> HttpResponse:
    return HttpResponse(content_type=BINARY_TYPE, parts=[await request.read()])


async def length(request: HttpRequest) -> HttpResponse:
    return json_response(len(await request.read()))


async def absent(request: HttpRequest) -> HttpResponse:
    raise ModelNotFound(request.names["model"])


async def broken(request: HttpRequest) -> HttpResponse:
    raise ZeroDivisionError("secret")


async def large(request: HttpRequest) -> HttpResponse:
    parts: list[Any] = [b"head", memoryview(bytes(1 << 20)), memoryview(b"tail")]
    return HttpResponse(content_type=BINARY_TYPE, parts=parts)


def gated(world: World) -> Callable[[HttpRequest], Awaitable[HttpResponse]]:
    async def wait(request: HttpRequest) -> HttpResponse:
        world.entered.set()
        try:
            await world.gate.wait()
        except asyncio.CancelledError:
            world.cancelled.set()
            raise
        return json_response("through")

    return wait


@asynccontextmanager
async def serving(world: World, **limits: Any) -> AsyncIterator[tuple[str, HttpServer]]:
    routes = RouteTable(
        Route(method, path, Operation.PAGE, handle, path, "test")
        for method, path, handle in (
            ("POST", "/echo", echo),
            ("POST", "/length", length),
            ("GET", "/absent/{model}", absent),
            ("GET", "/broken", broken),
            ("GET", "/large", large),
            ("GET", GATE, gated(world)),
        )
    )
    chosen = {"max_connections": 20, "max_header_bytes": 2048, "idle_seconds": 30.0} | {
        name: value for name, value in limits.items() if name in HttpLimits.__slots__
    }
    chosen["max_heads"] = limits.get("max_heads", 100)
    body = BodyLimits(MAX_BYTES, limits.get("max_chunks", 65536), limits.get("timeout", 30.0))
    async with serving_routes(routes, HttpLimits(**chosen, body=body)) as served:
        try:
            yield served
        finally:
            world.gate.set()


@pytest.fixture
async def world() -> World:
    return World()


@pytest.fixture
async def address(world: World) -> AsyncIterator[str]:
    async with serving(world) as (address, _):
        yield address


# --- answers -----------------------------------------------------------------------------------


async def test_an_error_has_the_status_of_the_table(address: str) -> None:
    answer = await ask(address, "GET", "/absent/no%20model")

    assert 404 == answer.status
    assert "Request for unknown model: 'no model' is not found" == answer.error


async def test_an_unexpected_exception_tells_nothing(address: str) -> None:
    answer = await ask(address, "GET", "/broken")

    assert (500, "internal error") == (answer.status, answer.error)


async def test_an_unknown_path_is_404_and_a_wrong_method_405(address: str) -> None:
    unknown = await ask(address, "GET", "/nothing/here")
    wrong = await ask(address, "DELETE", "/echo")

    assert 404 == unknown.status
    assert "'/nothing/here'" in unknown.error
    assert (405, "OPTIONS, POST") == (wrong.status, wrong.headers["allow"])
    assert "DELETE" in wrong.error


async def test_a_wrong_method_and_options_name_the_same_methods(address: str) -> None:
    """Both come from the same list, with HEAD next to GET (RFC 9110, 10.2.1)."""
    for path, methods in (("/echo", "OPTIONS, POST"), ("/large", "GET, HEAD, OPTIONS")):
        wrong = await ask(address, "PATCH", path)
        told = await ask(address, "OPTIONS", path)

        assert (405, 204) == (wrong.status, told.status)
        assert methods == wrong.headers["allow"] == told.headers["allow"]


async def test_bytes_that_are_not_utf8_in_a_path_come_back_escaped(address: str) -> None:
    answer = await ask(address, "GET", "/absent/%ff%fe")

    assert 404 == answer.status
    assert r"\udcff" in answer.error


async def test_head_has_the_headers_of_get(address: str) -> None:
    async with connect(address) as connection:
        head = await connection.ask(message("HEAD", "/large"), head=True)
        get = await connection.ask(message("GET", "/large"))

    assert (200, b"") == (head.status, head.body)
    assert head.headers["content-length"] == get.headers["content-length"]
    assert b"head" + bytes(1 << 20) + b"tail" == get.body


async def test_a_large_answer_is_written_in_turns(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel copies data within the write call, so that one large write blocks the others."""
    loop, turns = asyncio.get_running_loop(), 0
    written: list[tuple[int, int]] = []
    write = Connection.write

    async def noting(connection: Connection, data: Any) -> None:
        written.append((turns, len(data)))
        await write(connection, data)

    def turn() -> None:
        nonlocal turns
        turns += 1
        if turns:
            loop.call_soon(turn)

    monkeypatch.setattr(Connection, "write", noting)
    turn()
    answer = await ask(address, "GET", "/large")
    turns = -1  # the last one

    assert b"head" + bytes(1 << 20) + b"tail" == answer.body
    assert [4, 1 << 19, 1 << 19, 4] == [size for _, size in written]
    assert written[1][0] < written[2][0]


@pytest.mark.parametrize("site", ["cross-site"])
async def test_pages_of_other_sites_change_nothing(address: str, site: str) -> None:
    """Browsers send the origin of a request (Fetch Metadata, Sec-Fetch-Site)."""
    header = ("Sec-Fetch-Site", site)
    post = await ask(address, "POST", "/echo", header, body=b"x")
    get = await ask(address, "GET", "/large", header)

    assert (403, 200) == (post.status, get.status)
    assert "other sites" in post.error


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_answers_are_compressed_when_they_may_be(address: str, coding: str) -> None:
    unpack = UNPACK[coding]
    small = await ask(address, "POST", "/echo", ("Accept-Encoding", coding), body=bytes(100))
    medium = await ask(address, "POST", "/echo", ("Accept-Encoding", coding), body=bytes(2000))
    large = await ask(address, "GET", "/large", ("Accept-Encoding", coding))

    assert "content-encoding" not in small.headers
    assert coding == medium.headers["content-encoding"] == large.headers["content-encoding"]
    assert bytes(2000) == unpack(medium.body)
    assert b"head" + bytes(1 << 20) + b"tail" == unpack(large.body)


# --- bodies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 5000, MAX_BYTES])
@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_a_body_arrives_whole(address: str, size: int, framing: str) -> None:
    body = os.urandom(size)
    async with connect(address) as connection:
        if framing == "length":
            request = message("POST", "/echo", body=body, length=size)
        else:
            pieces = [body[start : start + 70_000] for start in range(0, size, 70_000)]
            request = message("POST", "/echo", CHUNKS, length=None) + chunked(*pieces)
        answer = await connection.ask(request)

    assert (200, body) == (answer.status, answer.body)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("size", [10, 500_000])
async def test_a_compressed_body_is_unpacked(address: str, coding: str, size: int) -> None:
    body = os.urandom(size)
    packed = PACK[coding](body)
    answer = await ask(address, "POST", "/echo", ("Content-Encoding", coding), body=packed)

    assert (200, body) == (answer.status, answer.body)


async def test_an_unknown_coding_is_not_implemented_and_names_those_that_are(address: str) -> None:
    answer = await ask(address, "POST", "/echo", ("Content-Encoding", "br"), body=b"x")

    assert (501, "gzip, deflate") == (answer.status, answer.headers["accept-encoding"])
    assert "'br'" in answer.error


async def refused(address: str, request: bytes) -> Answer:
    """Send a request whose refusal may cut it off, and compare memory before and after."""
    process = psutil.Process()
    before = process.memory_info().rss
    async with connect(address) as connection:
        answer = await connection.ask(request)
    grown = process.memory_info().rss - before

    assert answer.error
    assert grown < 64 << 20
    return answer


async def test_more_bytes_than_the_limit_are_refused(address: str) -> None:
    announced = await refused(address, message("POST", "/length", length=4 << 30))
    chunks = chunked(*[bytes(1 << 16)] * 17)
    sent = await refused(address, message("POST", "/length", CHUNKS, length=None) + chunks)

    assert (413, 413) == (announced.status, sent.status)
    assert "max_message_bytes" in announced.error


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_bomb_is_refused(address: str, coding: str) -> None:
    bomb = PACK[coding](bytes(200 << 20))
    header = ("Content-Encoding", coding)
    answer = await refused(address, message("POST", "/length", header, body=bomb))

    assert 413 == answer.status
    assert "decompressed" in answer.error


async def test_65536_chunks_are_read_and_one_more_is_refused(address: str) -> None:
    head = message("POST", "/length", CHUNKS, length=None)
    most = await ask_bytes(address, head + chunked(*[b"x"] * 65535))
    more = await refused(address, head + chunked(*[b"x"] * 65537))

    assert (200, 65535) == (most.status, most.json)
    assert 400 == more.status
    assert "65536 chunks (max_http_chunks)" in more.error


async def ask_bytes(address: str, request: bytes) -> Answer:
    async with connect(address) as connection:
        return await connection.ask(request)


async def test_a_body_that_does_not_come_is_given_up(world: World) -> None:
    async with serving(world, timeout=0.2) as (address, _), connect(address) as connection:
        answer = await connection.ask(message("POST", "/length", length=10))

    assert 408 == answer.status
    assert "message_timeout_seconds" in answer.error


async def test_chunks_that_are_none_are_refused(address: str) -> None:
    head = message("POST", "/length", CHUNKS, length=None)
    answer = await ask_bytes(address, head + b"zz\r\nabc\r\n0\r\n\r\n")

    assert 400 == answer.status
    assert answer.error


async def test_a_client_that_asks_first_is_told_to_go_on(address: str) -> None:
    """RFC 9110, section 10.1.1: it need not send a body that will be refused."""
    expect = ("Expect", "100-continue")
    async with connect(address) as connection:
        await connection.send(message("POST", "/echo", expect, length=3))
        await asyncio.sleep(0)
        await connection.send(b"abc")
        answer = await connection.answer()
        refused = await connection.ask(message("POST", "/echo", expect, length=MAX_BYTES + 1))

    assert ([100], b"abc") == (connection.interim, answer.body)
    assert 413 == refused.status


# --- connections -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"GET /broken HTTP/1.1\r\nHost: a\r\nbad header\r\n\r\n",
        b"GET /broken HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"GET /broken HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n",
        b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 500 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_refused_and_closed(address: str, request_: bytes) -> None:
    async with connect(address) as connection:
        answer = await connection.ask(request_)
        rest = await connection.ended()

    assert (400, b"") == (answer.status, rest)
    assert answer.error


async def test_a_connection_more_than_the_limit_is_refused(world: World) -> None:
    async with serving(world, max_connections=1) as (address, server):
        async with connect(address) as first:
            assert 200 == (await first.ask(message("GET", "/large"))).status
            assert 1 == server.connections
            async with connect(address) as second:
                answer = await second.answer()
                rest = await second.ended()
            assert 200 == (await first.ask(message("GET", "/large"))).status

    assert (503, b"") == (answer.status, rest)
    assert "max_http_connections" in answer.error


@pytest.mark.parametrize("sent", [b"", b"GET /large HTTP/1.1\r\nHo"])
async def test_a_connection_without_a_request_is_closed(world: World, sent: bytes) -> None:
    async with serving(world, idle_seconds=0.2) as (address, _), connect(address) as connection:
        await connection.send(sent)
        rest = await connection.ended()

    assert b"" == rest


async def test_a_client_that_leaves_cancels_its_request(address: str, world: World) -> None:
    async with connect(address) as connection:
        await connection.send(message("GET", GATE))
        await world.entered.wait()
    async with asyncio.timeout(10):
        await world.cancelled.wait()

    assert not world.gate.is_set()


async def test_requests_on_one_connection_are_answered_in_turn(address: str) -> None:
    async with connect(address) as connection:
        await connection.send(b"".join(message("POST", "/echo", body=b"%d" % n) for n in range(50)))
        answers = [(await connection.answer()).body for _ in range(50)]

    assert [b"%d" % n for n in range(50)] == answers


async def test_requests_in_progress_end_before_the_server_does(world: World) -> None:
    async with serving(world) as (address, server):
        async with connect(address) as busy, connect(address) as idle:
            await busy.send(message("GET", GATE))
            await world.entered.wait()
            draining = asyncio.ensure_future(server.drain(10))
            assert b"" == await idle.ended()
            world.gate.set()
            answer = await busy.answer()
            await draining
        with pytest.raises(OSError, match=r"."):
            await ask(address, "GET", "/large")

    assert (200, "through") == (answer.status, answer.json)


async def test_a_request_that_does_not_end_is_cut_off(world: World) -> None:
    async with serving(world) as (address, server), connect(address) as busy:
        await busy.send(message("GET", GATE))
        await world.entered.wait()
        await server.drain(0.1)
        rest = await busy.ended()

    assert b"" == rest
    assert world.cancelled.is_set()


async def test_a_reader_that_is_slow_gets_everything(address: str, tmp_path: Path) -> None:
    async with connect(address) as connection:
        await connection.send(message("GET", "/large"))
        await asyncio.sleep(0.2)
        answer = await connection.answer()

    assert (1 << 20) + 8 == len(answer.body)
