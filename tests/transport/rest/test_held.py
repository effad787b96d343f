"""Memory held for HTTP clients is on the ledger; the limits here are low."""

import asyncio
import gzip
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
from support.gateway import serving_routes
from support.http import chunked, connect, message

from xlaserve.http.connection.bodies import BodyLimits
from xlaserve.http.connection.held import Held, read_bytes
from xlaserve.http.connection.server import HttpLimits
from xlaserve.http.messages import (
    BINARY_TYPE,
    Answered,
    Begin,
    HttpRequest,
    HttpResponse,
    json_response,
)
from xlaserve.http.routing import Route, RouteTable
from xlaserve.net.ledger import Kind, Ledger
from xlaserve.serving.call import Headers, Operation, Peer

LIMIT = 1 << 20
BODY_BYTES = 1 << 20
CHUNKS = ("Transfer-Encoding", "chunked")
ANSWER_BYTES = 32 << 20
"""More than the buffers of both sockets take."""
TEXT_BYTES = 200_000
"""A quarter of the limit holds one such text, but not two."""


async def length(request: HttpRequest) -> HttpResponse:
    return json_response(len(await request.read()))


async def grown(request: HttpRequest) -> HttpResponse:
    request.grow(10 * len(await request.read()), "the parsed body")
    return json_response("grown")


async def large(request: HttpRequest) -> HttpResponse:
    return HttpResponse(content_type=BINARY_TYPE, parts=[memoryview(bytes(ANSWER_BYTES))])


async def text(request: HttpRequest) -> HttpResponse:
    return HttpResponse(content_type="text/plain", parts=[b" " * TEXT_BYTES])


def prepare(request: HttpRequest) -> Begin:
    def begin(
        body: memoryview, done: Answered, headers: Headers, peer: Peer, opened: int
    ) -> HttpResponse:
        return HttpResponse(content_type="text/plain", parts=[b" " * TEXT_BYTES])

    return begin


@asynccontextmanager
async def serving(
    ledger: Ledger, *, timeout: float = 30.0, chunks: int = 100
) -> AsyncIterator[str]:
    """Serve some routes; the ledger must be empty after the last connection."""
    routes = RouteTable(
        [
            *(
                Route(method, path, Operation.PAGE, handle, path, "test")
                for method, path, handle in (
                    ("POST", "/length", length),
                    ("POST", "/grown", grown),
                    ("POST", "/general", text),
                    ("GET", "/large", large),
                )
            ),
            Route("POST", "/fast", Operation.PAGE, text, "/fast", "test", prepare=prepare),
        ]
    )
    limits = HttpLimits(20, 2048, 30.0, BodyLimits(BODY_BYTES, chunks, timeout), 100)
    async with serving_routes(routes, limits, ledger) as (address, _):
        yield address
        await until(lambda: ledger.held == 0)
    assert 0 == ledger.waiting == sum(map(ledger.held_for, Kind))


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


def post(path: str, size: int, sent: int | None = None, *headers: tuple[str, str]) -> bytes:
    """Write a request with a body of this size, of which only `sent` bytes are included."""
    return message("POST", path, *headers, length=size) + bytes(size if sent is None else sent)


async def test_a_body_waits_until_others_have_ended_and_a_small_one_passes() -> None:
    ledger = Ledger(LIMIT)
    async with serving(ledger) as address:
        async with connect(address) as holds, connect(address) as waits, connect(address) as small:
            await holds.send(post("/length", 600_000, 100_000))
            await until(lambda: ledger.held == 600_000)
            await waits.send(post("/length", 300_000))
            await until(lambda: ledger.waiting)
            passed = await small.ask(post("/length", 10_000))
            assert (200, 10_000) == (passed.status, passed.json)
            assert 1 == ledger.waiting

            await holds.send(bytes(500_000))
            answers = [await client.answer() for client in (holds, waits)]
            assert [600_000, 300_000] == [answer.json for answer in answers]


async def test_what_waits_for_too_long_is_503_and_may_be_tried_again() -> None:
    ledger = Ledger(LIMIT)
    async with serving(ledger, timeout=0.5) as address:
        other = ledger.open()
        other.hold(700_000)
        async with connect(address) as waits:
            waited = await waits.ask(post("/length", 300_000, 300_000))
            assert (0, 700_000) == (ledger.waiting, ledger.held)
        other.close()

    assert (503, "1") == (waited.status, waited.headers["retry-after"])
    assert "max_held_bytes" in waited.error


async def test_what_comes_of_bodies_that_wait_is_held_too() -> None:
    """It is bounded: waiting requests may hold at most an eighth of the limit."""
    ledger = Ledger(LIMIT)
    ahead = 2 * read_bytes(LIMIT)
    async with serving(ledger) as address:
        other = ledger.open()
        other.hold(700_000)
        async with AsyncExitStack() as stack:
            for number in range(1, LIMIT // 8 // ahead + 1):
                waits = await stack.enter_async_context(connect(address))
                await waits.send(post("/length", 300_000))
                await until(partial(waits_for, ledger, number))
                assert 700_000 + number * ahead == ledger.held
            small = await stack.enter_async_context(connect(address))
            refused = await small.ask(post("/length", 300_000, 0))
            other.close()
        await until(lambda: ledger.held == 0)

    assert 503 == refused.status


def waits_for(ledger: Ledger, count: int) -> bool:
    return ledger.waiting == count


async def test_what_has_waited_is_held_once() -> None:
    ledger = Ledger(LIMIT)
    other, held = ledger.open(), Held(ledger.open(), Wire())
    other.hold(700_000)
    waiting = asyncio.ensure_future(held.reserve(300_000))
    await until(lambda: ledger.waiting)
    other.close()
    await waiting

    assert 300_000 == ledger.held


@pytest.mark.parametrize(
    ("limit", "size"), [(1 << 20, 16 << 10), (32 << 20, 128 << 10), (1 << 30, 256 << 10)]
)
def test_less_is_read_of_what_nobody_wants_where_little_may_be_held(limit: int, size: int) -> None:
    assert size == read_bytes(limit)


async def test_a_client_that_leaves_waits_no_longer() -> None:
    ledger = Ledger(LIMIT)
    async with serving(ledger) as address:
        async with connect(address) as holds:
            await holds.send(post("/length", 700_000, 100_000))
            await until(lambda: ledger.held)
            async with connect(address) as waits:
                await waits.send(post("/length", 300_000, 0))
                await until(lambda: ledger.waiting)
            await until(lambda: not ledger.waiting)
            assert 700_000 == ledger.held


async def test_more_than_a_connection_can_get_is_refused_at_once() -> None:
    ledger = Ledger(LIMIT)
    async with serving(ledger) as address, connect(address) as client:
        answer = await client.ask(post("/length", LIMIT * 3 // 4 + 1))

    assert 503 == answer.status
    assert 1 == ledger.refused


REFUSED = {
    "chunks": message("POST", "/length", CHUNKS) + chunked(*[bytes(100_000)] * 9),
    "bomb": message(
        "POST", "/length", ("Content-Encoding", "gzip"), body=gzip.compress(bytes(900_000))
    ),
    "parsed": post("/grown", 100_000),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_becomes_larger_than_there_is_memory_is_refused(name: str) -> None:
    ledger = Ledger(LIMIT)
    async with serving(ledger) as address, connect(address) as client:
        answer = await client.ask(REFUSED[name])
        assert (503, "1") == (answer.status, answer.headers["retry-after"])
        await until(lambda: ledger.held == 0)

    assert 1 == ledger.refused


@pytest.mark.parametrize("size", [0, 1, 70_000, 300_000])
async def test_what_there_is_memory_for_is_answered(size: int) -> None:
    ledger = Ledger(4 * LIMIT)
    body = os.urandom(size)
    packed = gzip.compress(body)
    async with serving(ledger) as address, connect(address) as client:
        whole = message("POST", "/length", body=body)
        chunks = message("POST", "/length", CHUNKS) + (chunked(body) if body else b"0\r\n\r\n")
        inflated = message("POST", "/length", ("Content-Encoding", "gzip"), body=packed)
        answers = [await client.ask(request) for request in (whole, chunks, inflated)]

    assert [size] * 3 == [answer.json for answer in answers]
    assert 0 == ledger.refused


@pytest.mark.parametrize(
    "line", [b"1;" + b"x" * 100_000, b"1;" + b"x" * 15_000 + b"\r\ny\r\n"], ids=["one", "many"]
)
async def test_what_is_around_chunks_is_bounded(line: bytes) -> None:
    """Chunk extensions are ignored (RFC 9112, 7.1.1): each one and their sum are limited."""
    ledger = Ledger(LIMIT)
    async with serving(ledger) as address, connect(address) as client:
        await client.send(message("POST", "/length", CHUNKS))
        for _ in range(95):
            await client.send(line)
        answer = await client.answer()

    assert 400 == answer.status
    assert any(part in answer.error for part in ("chunk extensions", "bytes around it"))


async def test_extensions_of_an_ordinary_length_are_read() -> None:
    async with serving(Ledger(LIMIT)) as address, connect(address) as client:
        for _ in range(3):
            body = b"3;name=value\r\nabc\r\n" * 100 + b"0\r\n\r\n"
            answer = await client.ask(message("POST", "/length", CHUNKS) + body)
            assert 300 == answer.json


async def test_an_answer_that_there_is_no_memory_for_is_503() -> None:
    async with serving(Ledger(LIMIT)) as address, connect(address) as client:
        answer = await client.ask(message("GET", "/large"))

    assert (503, "1") == (answer.status, answer.headers["retry-after"])


@pytest.mark.parametrize("path", ["/general", "/fast"])
async def test_an_answer_that_there_is_no_memory_to_compress_is_no_refusal(path: str) -> None:
    """The client gets the uncompressed answer, and no refusal is counted."""
    ledger = Ledger(LIMIT)
    accepts = message("POST", path, ("Accept-Encoding", "gzip"), body=b"x")
    async with serving(ledger) as address, connect(address) as client:
        answers = [await client.ask(accepts) for _ in range(2)]
        other = ledger.open()
        other.hold(LIMIT // 2)
        answers += [await client.ask(accepts) for _ in range(2)]
        other.close()

    codings = [answer.headers.get("content-encoding") for answer in answers]
    assert ["gzip", "gzip", None, None] == codings
    assert [TEXT_BYTES] * 2 == [len(answer.body) for answer in answers[2:]]
    assert 0 == ledger.refused


async def test_an_answer_counts_until_its_client_has_read_it() -> None:
    ledger = Ledger(4 * ANSWER_BYTES)
    async with serving(ledger) as address, connect(address) as client:
        await client.send(message("GET", "/large"))
        # The kernel and this client take some of it.
        await until(lambda: ledger.held_for(Kind.ANSWERS) == ANSWER_BYTES)
        answer = await client.answer()
        assert ANSWER_BYTES == len(answer.body)
        await until(lambda: ledger.held == 0)


async def test_answers_that_nobody_reads_are_few() -> None:
    ledger = Ledger(4 * ANSWER_BYTES)
    async with serving(ledger) as address:
        readers = []
        for _ in range(10):
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
            writer.write(message("GET", "/large"))
            readers.append((reader, writer))
        statuses = [int((await reader.readline()).split()[1]) for reader, _ in readers]
        assert 1 <= statuses.count(200) <= 3
        assert statuses.count(200) + statuses.count(503) == 10
        for _, writer in readers:
            writer.close()


class Wire(asyncio.Transport):
    """A transport with a given amount of unsent output."""

    waits = 0

    def get_write_buffer_size(self) -> int:
        return self.waits


async def test_an_answer_counts_while_it_waits_in_the_transport() -> None:
    ledger, wire = Ledger(LIMIT), Wire()
    held = Held(ledger.open(), wire)
    held.begin_part(100_000)
    wire.waits = 90_000
    held.pause()
    held.end_answer()
    assert 100_000 == ledger.held_for(Kind.ANSWERS)

    held.resume()
    assert 0 == ledger.held


async def test_short_answers_count_once_they_wait_in_the_transport() -> None:
    ledger, wire = Ledger(LIMIT), Wire()
    held = Held(ledger.open(), wire)
    held.begin_part(60_000)
    held.end_answer()
    assert 0 == ledger.held
    wire.waits = 70_000
    held.pause()
    assert 70_000 == ledger.held_for(Kind.ANSWERS)

    held.resume()
    assert 0 == ledger.held


async def test_what_comes_ahead_counts_as_long_as_it_is_kept() -> None:
    ledger = Ledger(LIMIT)
    held = Held(ledger.open(), Wire())
    for size in (5, 10, 3, 0):
        held.set_ahead(size)
        assert size == ledger.held_for(Kind.AHEAD) == ledger.held
