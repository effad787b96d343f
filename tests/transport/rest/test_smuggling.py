"""Requests with an ambiguous end: refused, or read strictly.

Each is followed by a second request, which is answered only if the first was accepted.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.gateway import serving_routes
from support.http import Connection, connect

from xlaserve.http.connection.bodies import BodyLimits
from xlaserve.http.connection.server import HttpLimits
from xlaserve.http.messages import BINARY_TYPE, HttpRequest, HttpResponse
from xlaserve.http.routing import Route, RouteTable
from xlaserve.serving.call import Operation

H = b"Host: localhost\r\n"
NEXT = b"GET /hello HTTP/1.1\r\n" + H + b"\r\n"
CL5 = b"Content-Length: 5"
TE = b"Transfer-Encoding: chunked"


def post(
    *headers: bytes, body: bytes = b"", line: bytes = b"POST /echo HTTP/1.1", host: bytes = H
) -> bytes:
    lines = b"".join(header + b"\r\n" for header in headers)
    return line + b"\r\n" + host + lines + b"\r\n" + body


REFUSED = {
    "the target's authority is not a valid host": b"GET /hello HTTP/1.1\r\n\r\n" + NEXT,
    "two hosts": post(b"Host: localhost", CL5, body=b"abcde") + NEXT,
    "cl twice same": post(CL5, CL5, body=b"abcde") + NEXT,
    "cl twice": post(CL5, b"Content-Length: 6", body=b"abcde") + NEXT,
    "cl list": post(b"Content-Length: 5, 5", body=b"abcde") + NEXT,
    "cl plus": post(b"Content-Length: +5", body=b"abcde") + NEXT,
    "cl neg": post(b"Content-Length: -5", body=b"abcde") + NEXT,
    "cl hex": post(b"Content-Length: 0x5", body=b"abcde") + NEXT,
    "cl under": post(b"Content-Length: 1_0", body=b"abcdeabcde") + NEXT,
    "cl sp inside": post(b"Content-Length: 5 5", body=b"abcde") + NEXT,
    "cl sp before colon": post(b"Content-Length : 5", body=b"abcde") + NEXT,
    "cl empty": post(b"Content-Length:", body=b"abcde") + NEXT,
    "cl vt": post(b"Content-Length:\x0b5", body=b"abcde") + NEXT,
    "cl huge": post(b"Content-Length: 18446744073709551621", body=b"abcde") + NEXT,
    "cl arabic": post(b"Content-Length: \xd9\xa5", body=b"abcde") + NEXT,
    "cl te": post(CL5, TE, body=b"0\r\n\r\n") + NEXT,
    "te cl": post(TE, CL5, body=b"0\r\n\r\n") + NEXT,
    "te gzip": post(b"Transfer-Encoding: gzip", body=b"0\r\n\r\n") + NEXT,
    "te chunked gzip": post(b"Transfer-Encoding: chunked, gzip", body=b"0\r\n\r\n") + NEXT,
    "te twice": post(TE, TE, body=b"0\r\n\r\n") + NEXT,
    "te chunked chunked": post(b"Transfer-Encoding: chunked, chunked", body=b"0\r\n\r\n") + NEXT,
    "te xchunked": post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n") + NEXT,
    "te identity": post(b"Transfer-Encoding: identity", CL5, body=b"abcde") + NEXT,
    "te sp colon": post(b"Transfer-Encoding : chunked", body=b"0\r\n\r\n") + NEXT,
    "te vt": post(b"Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n") + NEXT,
    "te fold": post(b"Transfer-Encoding:\r\n chunked", body=b"0\r\n\r\n") + NEXT,
    "te quoted": post(b'Transfer-Encoding: "chunked"', body=b"0\r\n\r\n") + NEXT,
    "te param": post(b"Transfer-Encoding: chunked;a=b", body=b"0\r\n\r\n") + NEXT,
    "te trailing comma": post(b"Transfer-Encoding: chunked,", body=b"0\r\n\r\n") + NEXT,
    "te empty": post(b"Transfer-Encoding:", CL5, body=b"abcde") + NEXT,
    "te 1.0": post(TE, b"Connection: keep-alive", body=b"0\r\n\r\n", line=b"POST /echo HTTP/1.0")
    + NEXT,
    "te prefix line": post(b"X: y\rTransfer-Encoding: chunked", body=b"0\r\n\r\n") + NEXT,
    "te bare lf": post(b"X: y\nTransfer-Encoding: chunked", body=b"0\r\n\r\n") + NEXT,
    "te nul": post(b"Transfer-Encoding: chunked\x00", body=b"0\r\n\r\n") + NEXT,
    "chunk ext lf": post(TE, body=b"5;a\nb\r\nabcde\r\n0\r\n\r\n") + NEXT,
    "chunk ext cr": post(TE, body=b"5;a\rb\r\nabcde\r\n0\r\n\r\n") + NEXT,
    "chunk ext nul": post(TE, body=b"5;a\x00b\r\nabcde\r\n0\r\n\r\n") + NEXT,
    "chunk sp": post(TE, body=b"5 \r\nabcde\r\n0\r\n\r\n") + NEXT,
    "chunk lead sp": post(TE, body=b" 5\r\nabcde\r\n0\r\n\r\n") + NEXT,
    "chunk sp ext": post(TE, body=b"5 ;a\r\nabcde\r\n0\r\n\r\n") + NEXT,
    "chunk plus": post(TE, body=b"+5\r\nabcde\r\n0\r\n\r\n") + NEXT,
    "chunk neg": post(TE, body=b"-5\r\nabcde\r\n0\r\n\r\n") + NEXT,
    "chunk 0x": post(TE, body=b"0x5\r\nabcde\r\n0\r\n\r\n") + NEXT,
    "chunk under": post(TE, body=b"0_5\r\nabcde\r\n0\r\n\r\n") + NEXT,
    "chunk lf": post(TE, body=b"5\nabcde\n0\n\n") + NEXT,
    "chunk lf data": post(TE, body=b"5\r\nabcde\n0\r\n\r\n") + NEXT,
    "chunk long data": post(TE, body=b"5\r\nabcdeXX0\r\n\r\n") + NEXT,
    "chunk short": post(TE, body=b"5\r\nabc\r\n0\r\n\r\n") + NEXT,
    "chunk overflow": post(TE, body=b"10000000000000005\r\nabcde\r\n0\r\n\r\n") + NEXT,
    "chunk empty": post(TE, body=b"\r\nabcde\r\n0\r\n\r\n") + NEXT,
    "trailer cl": post(TE, body=b"0\r\nContent-Length: 50\r\n\r\n") + NEXT,
    "trailer bad": post(TE, body=b"0\r\nX y\r\n\r\n") + NEXT,
    "trailer fold": post(TE, body=b"0\r\nX: y\r\n z\r\n\r\n") + NEXT,
    "trailer lf": post(TE, body=b"0\r\nX: y\n\r\n") + NEXT,
    "lf head": b"GET /hello HTTP/1.1\nHost: localhost\n\n" + NEXT,
    "lf one": b"GET /hello HTTP/1.1\r\nHost: localhost\n\r\n" + NEXT,
    "cr head": b"GET /hello HTTP/1.1\rHost: localhost\r\r" + NEXT,
    "fold": post(b"X: y\r\n z", CL5, body=b"abcde") + NEXT,
    "fold first": b"GET /hello HTTP/1.1\r\n X: y\r\nHost: localhost\r\n\r\n" + NEXT,
    "nul name": post(b"X\x00: y", CL5, body=b"abcde") + NEXT,
    "nul value": post(b"X: y\x00", CL5, body=b"abcde") + NEXT,
    "space name": post(b"X Y: z", CL5, body=b"abcde") + NEXT,
    "no name": post(b": z", CL5, body=b"abcde") + NEXT,
    "no colon": post(b"XYZ", CL5, body=b"abcde") + NEXT,
    "high name": post(b"X\xff: z", CL5, body=b"abcde") + NEXT,
    "ctl value": post(b"X: a\x01b", CL5, body=b"abcde") + NEXT,
    "del value": post(b"X: a\x7fb", CL5, body=b"abcde") + NEXT,
    "leading lf": b"\n" + NEXT,
    "leading sp": b" " + NEXT,
    "tab line": b"GET\t/hello\tHTTP/1.1\r\n" + H + b"\r\n" + NEXT,
    "trail sp": b"GET /hello HTTP/1.1 \r\n" + H + b"\r\n" + NEXT,
    "lower http": b"GET /hello http/1.1\r\n" + H + b"\r\n" + NEXT,
    "lower get": b"get /hello HTTP/1.1\r\n" + H + b"\r\n" + NEXT,
    "foo method": b"FOO /hello HTTP/1.1\r\n" + H + b"\r\n" + NEXT,
    "3": b"GET /hello HTTP/3\r\n" + H + b"\r\n" + NEXT,
    "none": b"GET /hello\r\n" + H + b"\r\n" + NEXT,
    "11": b"GET /hello HTTP/1.10\r\n" + H + b"\r\n" + NEXT,
    "1": b"GET /hello HTTP/1\r\n" + H + b"\r\n" + NEXT,
    "rtsp": b"GET /hello RTSP/1.0\r\n" + H + b"\r\n" + NEXT,
    "abs userinfo": b"GET http://u:p@localhost/hello HTTP/1.1\r\n" + H + b"\r\n" + NEXT,
    "abs no authority": b"GET http:///hello HTTP/1.1\r\n" + H + b"\r\n" + NEXT,
    "get *": b"GET * HTTP/1.1\r\n" + H + b"\r\n" + NEXT,
    "utf8 path": "GET /hellö HTTP/1.1\r\n".encode() + H + b"\r\n" + NEXT,
    "noslash": b"GET hello HTTP/1.1\r\n" + H + b"\r\n" + NEXT,
}

TAKEN = {
    "plain": (post(CL5, body=b"abcde") + NEXT, b"<abcde>"),
    "empty host": (post(CL5, body=b"abcde", host=b"Host:\r\n") + NEXT, b"<abcde>"),
    "bad host": (post(CL5, body=b"abcde", host=b"Host: a b\r\n") + NEXT, b"<abcde>"),
    "cl sp": (post(b"Content-Length: 5 ", body=b"abcde") + NEXT, b"<abcde>"),
    "cl tab": (post(b"Content-Length:\t5", body=b"abcde") + NEXT, b"<abcde>"),
    "cl zeros": (post(b"Content-Length: 0000000005", body=b"abcde") + NEXT, b"<abcde>"),
    "te": (post(TE, body=b"5\r\nabcde\r\n0\r\n\r\n") + NEXT, b"<abcde>"),
    "te upper": (
        post(b"TRANSFER-ENCODING: CHUNKED", body=b"5\r\nabcde\r\n0\r\n\r\n") + NEXT,
        b"<abcde>",
    ),
    "te tab": (post(b"Transfer-Encoding:\tchunked", body=b"0\r\n\r\n") + NEXT, b"<>"),
    "te leading comma": (post(b"Transfer-Encoding: ,chunked", body=b"0\r\n\r\n") + NEXT, b"<>"),
    "te underscore": (post(b"Transfer_Encoding: chunked", CL5, body=b"abcde") + NEXT, b"<abcde>"),
    "chunk ext": (post(TE, body=b"5;a=b\r\nabcde\r\n0\r\n\r\n") + NEXT, b"<abcde>"),
    "chunk zeros": (post(TE, body=b"000000005\r\nabcde\r\n0\r\n\r\n") + NEXT, b"<abcde>"),
    "chunk 00": (post(TE, body=b"5\r\nabcde\r\n000\r\n\r\n") + NEXT, b"<abcde>"),
    "high value": (post(b"X: \xff", CL5, body=b"abcde") + NEXT, b"<abcde>"),
    "leading crlf": (b"\r\n" + NEXT + NEXT, b""),
    "leading 2 crlf": (b"\r\n\r\n" + NEXT + NEXT, b""),
    "crlf between": (post(CL5, body=b"abcde") + b"\r\n" + NEXT, b"<abcde>"),
    "2 spaces": (b"GET  /hello HTTP/1.1\r\n" + H + b"\r\n" + NEXT, b""),
    "get body": (b"GET /hello HTTP/1.1\r\n" + H + CL5 + b"\r\n\r\nabcde" + NEXT, b""),
    "get te": (b"GET /hello HTTP/1.1\r\n" + H + TE + b"\r\n\r\n0\r\n\r\n" + NEXT, b""),
}
"""The accepted requests, and the body that is read."""


async def echo(request: HttpRequest) -> HttpResponse:
    return HttpResponse(content_type=BINARY_TYPE, parts=[b"<%b>" % bytes(await request.read())])


async def hello(request: HttpRequest) -> HttpResponse:
    return HttpResponse(parts=[b"hello"])


@pytest.fixture
async def client() -> AsyncIterator[Connection]:
    routes = RouteTable(
        [
            Route("POST", "/echo", Operation.PAGE, echo, "", "test"),
            Route("GET", "/hello", Operation.PAGE, hello, "", "test"),
        ]
    )
    limits = HttpLimits(20, 1 << 14, 30.0, BodyLimits(1 << 20, 100, 30.0), 100)
    async with serving_routes(routes, limits) as (address, _), connect(address) as client:
        yield client


@pytest.mark.parametrize("name", REFUSED)
async def test_what_may_be_read_in_two_ways_is_refused(client: Connection, name: str) -> None:
    """Later bytes are not parsed: they may belong to the body."""
    answer = await client.ask(REFUSED[name])
    rest = await client.ended()

    assert (400, "close", b"") == (answer.status, answer.headers["connection"], rest)
    assert answer.error


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("parts", [1, 7])
async def test_what_has_one_meaning_is_read(client: Connection, name: str, parts: int) -> None:
    request, body = TAKEN[name]
    step = len(request) // parts + 1
    for begin in range(0, len(request), step):
        await client.send(request[begin : begin + step])
        await asyncio.sleep(0)
    first, second = await client.answer(), await client.answer()

    assert (200, 200, b"hello") == (first.status, second.status, second.body)
    assert first.body == (body or b"hello")
