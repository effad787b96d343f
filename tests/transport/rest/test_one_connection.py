"""Every request on a connection is answered in order, whatever precedes and follows it."""

import asyncio
import asyncio.selector_events
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.conditions import until
from support.gateway import serving_routes
from support.http import SECONDS, chunked, connect, message

from xlaserve.http.connection.bodies import BodyLimits
from xlaserve.http.connection.connection import Connection
from xlaserve.http.connection.server import HttpLimits, HttpServer
from xlaserve.http.messages import (
    BINARY_TYPE,
    Answered,
    Begin,
    HttpRequest,
    HttpResponse,
    HttpStream,
)
from xlaserve.http.routing import Route, RouteTable
from xlaserve.serving.call import Operation

TE = ("Transfer-Encoding", "chunked")
UPGRADE = (("Connection", "Upgrade"), ("Upgrade", "h2c"))


def echo(body: bytes, *headers: tuple[str, str], target: str = "/echo") -> bytes:
    return message("POST", target, *headers, body=body, length=len(body))


def in_chunks(*headers: tuple[str, str]) -> bytes:
    return message("POST", "/echo", TE, *headers, length=None) + chunked(b"ca", b"use")


def of_1_0(request: bytes) -> bytes:
    return request.replace(b"HTTP/1.1", b"HTTP/1.0", 1)


@dataclass(frozen=True)
class Cause:
    """A request that once broke the connection, and the expected answer."""

    request: bytes
    statuses: tuple[int, ...] = (200,)
    body: bytes = b"<cause>"
    stays: bool = True
    """Whether another request may follow."""


CLOSE = ("Connection", "close")
CAUSES = {
    "known": Cause(echo(b"cause")),
    "an upgrade that is declined": Cause(echo(b"cause", *UPGRADE)),
    "an upgrade without a body": Cause(message("GET", "/hello", *UPGRADE), body=b"<hello>"),
    "a web socket": Cause(
        message("GET", "/hello", ("Connection", "keep-alive, Upgrade"), ("Upgrade", "websocket")),
        body=b"<hello>",
    ),
    "an upgrade with chunks": Cause(in_chunks(*UPGRADE)),
    "an upgrade that is not for this connection": Cause(echo(b"cause", ("Upgrade", "h2c"))),
    "chunks": Cause(in_chunks()),
    "a trailer": Cause(in_chunks()[:-2] + b"X: y\r\n\r\n"),
    "an extension": Cause(
        message("POST", "/echo", TE, length=None) + b'5;a="b"\r\ncause\r\n0;c\r\n\r\n'
    ),
    "a client that asks first": Cause(echo(b"cause", ("Expect", "100-continue")), (100, 200)),
    "one that expects more": Cause(echo(b"cause", ("Expect", "100-continue, x=y")), (100, 200)),
    "one that expects something else": Cause(echo(b"cause", ("Expect", "x=y"))),
    "a body for GET": Cause(message("GET", "/hello", body=b"cause"), body=b"<hello>"),
    "HEAD": Cause(message("HEAD", "/hello"), body=b""),
    "an address": Cause(echo(b"cause", target="http://localhost/echo")),
    "a stream": Cause(message("GET", "/stream"), body=b"<stream>"),
    "not found": Cause(echo(b"cause", target="/nothing"), (404,), b""),
    "compressed": Cause(echo(b"cause", ("Content-Encoding", "gzip")), (400,), b""),
    "too large": Cause(echo(bytes(4097)), (413,), b""),
    "empty lines before it": Cause(b"\r\n\r\n" + echo(b"cause")),
    "HTTP/1.0 that stays": Cause(of_1_0(echo(b"cause", ("Connection", "keep-alive")))),
    "the last one": Cause(echo(b"cause", CLOSE), stays=False),
    "the last one of a list": Cause(echo(b"cause", ("Connection", "x, Close")), stays=False),
    "the last one in chunks": Cause(in_chunks(CLOSE), stays=False),
    "the last one, in a stream": Cause(
        message("GET", "/stream", CLOSE), (200,), b"<stream>", False
    ),
    "HTTP/1.0": Cause(of_1_0(echo(b"cause")), stays=False),
    "HTTP/1.0 asks for no word": Cause(
        of_1_0(echo(b"cause", ("Expect", "100-continue"))), stays=False
    ),
    "CONNECT": Cause(message("CONNECT", "localhost:80"), (404,), b"", False),
    "no request": Cause(b"GET /hello HTTP/1.1\r\nbad header\r\n\r\n", (400,), b"", False),
    "no chunks": Cause(
        message("POST", "/echo", TE, length=None) + b"cause\r\n\r\n", (400,), b"", False
    ),
    "a coding that is not there": Cause(
        message("POST", "/echo", ("Transfer-Encoding", "gzip, chunked"), length=None)
        + chunked(b"cause"),
        (501,),
        b"",
        False,
    ),
    "codings in two lines": Cause(
        message("POST", "/echo", ("Transfer-Encoding", "gzip"), TE, length=None) + chunked(b"c"),
        (501,),
        b"",
        False,
    ),
    "HTTP/2.0": Cause(echo(b"cause").replace(b"HTTP/1.1", b"HTTP/2.0"), (505,), b"", False),
    "HTTP/1.2": Cause(echo(b"cause").replace(b"HTTP/1.1", b"HTTP/1.2"), (505,), b"", False),
    "two ends": Cause(
        message("POST", "/echo", TE, length=5) + chunked(b"cause"), (400,), b"", False
    ),
    "chunks of HTTP/1.0": Cause(of_1_0(in_chunks()), (400,), b"", False),
    "two hosts": Cause(echo(b"cause", ("Host", "other")), (400,), b"", False),
}
FOLLOWING = {
    "nothing": (b"", (), b""),
    "a known one": (echo(b"next"), (200,), b"<next>"),
    "another one": (message("GET", "/hello"), (200,), b"<hello>"),
    "no request": (b"?\r\n\r\n", (400,), b""),
    "a part of one": (echo(b"next")[:-1], (), b""),
}


async def respond(request: HttpRequest) -> HttpResponse:
    return HttpResponse(content_type=BINARY_TYPE, parts=[b"<%b>" % bytes(await request.read())])


async def hello(request: HttpRequest) -> HttpResponse:
    return HttpResponse(parts=[b"<hello>"])


async def stream(request: HttpRequest) -> HttpStream:
    async def parts() -> AsyncIterator[bytes]:
        yield b"<str"
        yield b"eam>"

    return HttpStream("text/plain", parts())  # type: ignore[arg-type]


def prepare(request: HttpRequest) -> Begin:
    def begin(body: memoryview, done: Answered, *_: Any) -> HttpResponse:
        return HttpResponse(content_type=BINARY_TYPE, parts=[b"<%b>" % bytes(body)])

    return begin


@pytest.fixture
async def served() -> AsyncIterator[tuple[str, HttpServer]]:
    routes = RouteTable(
        [
            Route("POST", "/echo", Operation.PAGE, respond, "", "test", prepare=prepare),
            Route("GET", "/hello", Operation.PAGE, hello, "", "test"),
            Route("GET", "/stream", Operation.PAGE, stream, "", "test"),
        ]
    )
    limits = HttpLimits(1000, 1 << 14, 30.0, BodyLimits(4096, 100, 30.0), 100)
    async with serving_routes(routes, limits) as served:
        yield served


@dataclass(frozen=True)
class Told:
    """The answers received on one connection."""

    statuses: tuple[int, ...]
    bodies: bytes
    closed: bool


def told(data: bytes, *, closed: bool) -> Told:
    # Chunk framing and error bodies are left out.
    found = re.findall(rb"HTTP/1\.1 ([0-9]+)", data)
    text = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", data)
    return Told(tuple(map(int, found)), b"".join(re.findall(rb"<[a-z]*>", text)), closed)


def expected(before: int, cause: Cause, following: str) -> Told:
    _, statuses, body = FOLLOWING[following] if cause.stays else (b"", (), b"")
    closes = not cause.stays or following == "no request"
    return Told(
        (*[200] * before, *cause.statuses, *statuses),
        b"<first>" * before + cause.body + body,
        closes,
    )


@pytest.mark.parametrize("name", CAUSES)
async def test_every_request_of_a_pipeline_is_answered(
    served: tuple[str, HttpServer], name: str, subtests: pytest.Subtests
) -> None:
    """On a socket: first, in the middle, and last, followed by each of the other requests."""
    address, _ = served
    cause = CAUSES[name]
    for before, following in product((0, 1, 3), FOLLOWING):
        with subtests.test(before=before, following=following):
            async with connect(address) as client:
                behind = FOLLOWING[following][0]
                await client.send(echo(b"first") * before + cause.request + behind)
                wanted = expected(before, cause, following)
                found = await _answers(client.reader, wanted)

            assert wanted == found


async def _answers(reader: asyncio.StreamReader, wanted: Told) -> Told:
    """Read until the wanted answers have arrived, and the end of the connection if it is wanted."""
    data, closed = b"", False
    async with asyncio.timeout(SECONDS):
        while wanted.closed or len(told(data, closed=False).statuses) < len(wanted.statuses):
            piece = await reader.read(1 << 16)
            if not piece:
                closed = True
                break
            data += piece
        while not closed and told(data, closed=False).bodies != wanted.bodies:
            piece = await reader.read(1 << 16)
            if not piece:
                break
            data += piece
    return told(data, closed=closed)


class Wire(asyncio.Transport):
    """A transport that records the output."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.closed:
            self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


async def conversation(server: HttpServer, parts: list[bytes], wanted: Told) -> Told:
    """Deliver bytes to a connection in exactly these parts."""
    make: Callable[[], Connection] | None = server._server
    assert make is not None
    connection, wire = make(), Wire()
    connection.connection_made(wire)
    for part in parts:
        if not wire.closed:
            connection.data_received(part)
        for _ in range(3):
            await asyncio.sleep(0)
    for _ in range(400):
        if wanted == told(wire.written, closed=wire.closed):
            break
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    return told(wire.written, closed=wire.closed)


@pytest.mark.parametrize("name", CAUSES)
async def test_a_request_may_come_in_any_two_parts(
    served: tuple[str, HttpServer], name: str
) -> None:
    """Cut at each position, including the boundaries to the previous and the next request."""
    _, server = served
    cause = CAUSES[name]
    first, behind = echo(b"first"), FOLLOWING["a known one"][0]
    data = first + cause.request + behind
    wanted = expected(1, cause, "a known one")
    places = range(len(first) - 2, len(first) + len(cause.request) + 3)
    wrong = {
        place: found
        for place in (places if len(places) < 1000 else places[:: len(places) // 200])
        if wanted != (found := await conversation(server, [data[:place], data[place:]], wanted))
    }

    assert {} == wrong


@pytest.mark.parametrize("name", CAUSES)
async def test_a_request_may_come_byte_by_byte(served: tuple[str, HttpServer], name: str) -> None:
    _, server = served
    cause = CAUSES[name]
    data = cause.request + FOLLOWING["a known one"][0]
    wanted = expected(0, cause, "a known one")
    step = max(1, len(data) // 500)
    parts = [data[place : place + step] for place in range(0, len(data), step)]

    assert wanted == await conversation(server, parts, wanted)


# --- single rules ------------------------------------------------------------------------------


async def test_what_comes_behind_the_last_request_does_not_take_its_answer_away(
    served: tuple[str, HttpServer],
) -> None:
    """RFC 9112, 9.6: more bytes than the kernel buffers arrive while the answer is being sent."""
    async with connect(served[0]) as client:
        await client.send(echo(b"cause", CLOSE) + bytes(1 << 20))
        answer = await client.answer()
        rest = await client.ended()

    assert (200, b"<cause>", b"") == (answer.status, answer.body, rest)
    assert "close" == answer.headers["connection"]


async def test_a_body_that_was_asked_for_and_is_not_wanted_ends_its_connection(
    served: tuple[str, HttpServer],
) -> None:
    """RFC 9110, 10.1.1: whether the client sends the body or its next request is ambiguous."""
    async with connect(served[0]) as client:
        expect = ("Expect", "100-continue")
        answer = await client.ask(message("POST", "/echo", expect, length=4097))
        rest = await client.ended()

    assert (413, "close", b"", []) == (
        answer.status,
        answer.headers["connection"],
        rest,
        client.interim,
    )


@pytest.mark.parametrize(
    ("target", "status", "allowed"),
    [
        ("*", 204, "GET, HEAD, OPTIONS, POST"),
        ("http://localhost", 204, "GET, HEAD, OPTIONS, POST"),
        ("/echo", 204, "OPTIONS, POST"),
        ("/hello", 204, "GET, HEAD, OPTIONS"),
        ("/nothing", 404, None),
    ],
)
async def test_options_tell_what_may_be_asked(
    served: tuple[str, HttpServer], target: str, status: int, allowed: str | None
) -> None:
    """RFC 9110, 9.3.7."""
    async with connect(served[0]) as client:
        answers = [await client.ask(message("OPTIONS", target)) for _ in range(3)]

    assert [(status, allowed)] * 3 == [(one.status, one.headers.get("allow")) for one in answers]
    assert status != 204 or "content-length" not in answers[0].headers


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost:1/hello", 200),
        ("HTTPS://localhost/hello", 200),
        ("http://localhost?x", 404),
        ("http://u@localhost/hello", 400),
        ("http:///hello", 400),
        ("*", 400),
        ("/hello#part", 404),
    ],
)
async def test_a_target_may_be_an_address(
    served: tuple[str, HttpServer], target: str, status: int
) -> None:
    async with connect(served[0]) as client:
        assert status == (await client.ask(message("GET", target))).status


async def test_what_is_asked_for_now_is_not_kept(served: tuple[str, HttpServer]) -> None:
    """RFC 9111, 4.2.2: caches store answers to GET by default, even errors."""
    async with connect(served[0]) as client:
        found = await client.ask(message("GET", "/hello"))
        absent = await client.ask(message("GET", "/nothing"))
        posted = await client.ask(echo(b"x"))

    assert ["no-store"] * 2 == [one.headers["cache-control"] for one in (found, absent)]
    assert "cache-control" not in posted.headers


LIMITS = {
    "request line": b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n" % (b"x" * (1 << 14)),
    "header": message("GET", "/hello", ("X", "y" * (1 << 14))),
    "headers": message("GET", "/hello", *[("X", "y")] * 128),
    "bytes": message("GET", "/hello", *[("X", "y" * 10_000)] * 14),
}


@pytest.mark.parametrize("name", LIMITS)
async def test_a_header_block_is_bounded(served: tuple[str, HttpServer], name: str) -> None:
    async with connect(served[0]) as client:
        answer = await client.ask(LIMITS[name])

    assert 400 == answer.status
    assert name.rpartition(" ")[2] in answer.error
    assert re.search("than [0-9]+", answer.error)


async def test_a_client_that_is_quicker_than_the_end_is_no_mistake(
    served: tuple[str, HttpServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HAProxy's health checks reset the connection as soon as they have their answer."""
    transport: Any = asyncio.selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
    end, failed = transport.write_eof, []
    host, _, port = served[0].rpartition(":")
    client = socket.create_connection((host, int(port)))

    def end_behind_the_reset(self: Any) -> None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        try:
            end(self)
        except OSError as error:
            failed.append(type(error))
            raise

    monkeypatch.setattr(transport, "write_eof", end_behind_the_reset)
    with capture_logs() as log:
        client.sendall(message("GET", "/hello", ("Connection", "close")))
        await until(lambda: bool(failed))
        await until(lambda: not served[1].connections)

    assert [OSError] == failed
    assert [] == [record for record in log if record["log_level"] == "error"]
