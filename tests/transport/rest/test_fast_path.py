"""The HTTP fast path: it gives the same answers as the general path, and falls back to it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from support.gateway import serving_routes
from support.http import Connection as Client
from support.http import chunked, connect, message

from xlaserve.errors import ModelNotFound
from xlaserve.http.connection.bodies import BodyLimits
from xlaserve.http.connection.connection import Connection
from xlaserve.http.connection.fast_path import FastPath
from xlaserve.http.connection.held import Held
from xlaserve.http.connection.plans import Plan, Plans
from xlaserve.http.connection.server import HttpLimits, HttpServer
from xlaserve.http.connection.states import Input, State
from xlaserve.http.messages import (
    BINARY_TYPE,
    Answered,
    Begin,
    HttpRequest,
    HttpResponse,
    json_response,
)
from xlaserve.http.routing import Route, RouteTable
from xlaserve.http.threads import INLINE_BYTES
from xlaserve.net.ledger import Ledger
from xlaserve.serving.call import NOBODY, Operation
from xlaserve.serving.inference import Pending

MAX_BYTES = 1 << 20
LARGE = bytes(range(256)) * 1024
ENDS = "\r\n\r\n"


class Desk:
    """Holds the requests for /wait until the test answers them."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.waiting: list[tuple[bytes, Answered]] = []
        self.handled = 0
        """Number of requests on the general path."""

    def cancel(self) -> None:
        self.cancelled.set()

    def answer(self) -> None:
        """Answer the oldest request."""
        body, done = self.waiting.pop(0)
        done(HttpResponse(content_type=BINARY_TYPE, parts=[body]))

    def begin(self, what: str, body: memoryview, done: Answered) -> HttpResponse | Pending:
        match what:
            case "absent":
                raise ModelNotFound("m")
            case "broken":
                raise ZeroDivisionError("secret")
            case "large":
                return HttpResponse(content_type=BINARY_TYPE, parts=[b"head", LARGE, b"tail"])
            case "headers":
                return HttpResponse(parts=[b"{}"], headers={"X-Length": "2"})
            case "wait":
                self.waiting.append((bytes(body), done))
                self.entered.set()
                return self
        return HttpResponse(content_type=BINARY_TYPE, parts=[bytes(body)])

    def prepare(self, request: HttpRequest) -> Begin:
        what = request.names["what"]
        return lambda body, done, headers, peer, opened: self.begin(what, body, done)

    async def handle(self, request: HttpRequest) -> HttpResponse:
        self.handled += 1
        answer: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()

        def done(result: HttpResponse | BaseException) -> None:
            assert isinstance(result, HttpResponse)
            answer.set_result(result)

        begun = self.begin(request.names["what"], await request.read(), done)
        if isinstance(begun, HttpResponse):
            return begun
        try:
            return await answer
        finally:
            begun.cancel()


@asynccontextmanager
async def serving(
    desk: Desk, *, idle: float = 30.0, timeout: float = 30.0, max_heads: int = 100
) -> AsyncIterator[tuple[str, HttpServer]]:
    async def hello(request: HttpRequest) -> HttpResponse:
        return json_response("hello")

    routes = RouteTable(
        [
            Route(
                "POST",
                "/do/{what}",
                Operation.PAGE,
                desk.handle,
                "do",
                "test",
                prepare=desk.prepare,
            ),
            Route("GET", "/hello", Operation.PAGE, hello, "hello", "test"),
        ]
    )
    limits = HttpLimits(20, 1 << 14, idle, BodyLimits(MAX_BYTES, 100, timeout), max_heads)
    async with serving_routes(routes, limits) as served:
        yield served


@pytest.fixture
async def desk() -> Desk:
    return Desk()


@pytest.fixture
async def address(desk: Desk) -> AsyncIterator[str]:
    async with serving(desk) as (address, _):
        yield address


@contextmanager
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Record the data that goes to the general path."""
    noted: list[bytes] = []
    take_over = Connection.take_over

    def note(self: Connection, data: bytes) -> None:
        noted.append(data)
        take_over(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "take_over", note)
        yield noted


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The requests on the general path, by their first bytes."""
    with noting(monkeypatch) as noted:
        yield noted


async def raw(client: Client, request: bytes) -> tuple[list[str], bytes]:
    """Return the head of an answer without its date, and the body."""
    await client.send(request)
    head = (await client.reader.readuntil(ENDS.encode())).decode()
    lines = [line for line in head.split("\r\n") if not line.startswith("Date: ")]
    assert len(head.split("\r\n")) == len(lines) + 1
    length = next(line for line in lines if line.startswith("Content-Length: "))
    return lines, await client.reader.readexactly(int(length.split(" ")[1]))


def do(what: str, body: bytes = b"abc", *headers: tuple[str, str]) -> bytes:
    return message("POST", f"/do/{what}", *headers, body=body, length=len(body))


async def teach(client: Client, request: bytes) -> None:
    """Send a request, so that its head is known afterwards."""
    await raw(client, request)


# --- the same answers --------------------------------------------------------------------------


@pytest.mark.parametrize("coding", ["", "identity", "gzip", "deflate, br", "br"])
@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("echo", b""),
        ("echo", b"x"),
        ("echo", b"x" * 1023),
        ("echo", b"x" * 1024),
        ("echo", b"x" * INLINE_BYTES),
        ("large", b"abc"),
        ("headers", b"abc"),
        ("absent", b"abc"),
        ("broken", b"abc"),
    ],
)
async def test_both_ways_answer_byte_for_byte_alike(
    address: str, general: list[bytes], what: str, body: bytes, coding: str
) -> None:
    request = do(what, body, *([("Accept-Encoding", coding)] if coding else []))
    async with connect(address) as client:
        first = await raw(client, request)
        went = len(general)
        second = await raw(client, request)
        third = await raw(client, request)

    assert [1, 1] == [went, len(general)]
    assert first == second == third


async def test_a_head_is_known_on_every_connection(address: str, general: list[bytes]) -> None:
    for number in range(5):
        async with connect(address) as client:
            # The first bytes of a connection may arrive before aiohttp waits for them.
            assert 200 == (await client.ask(message("GET", "/hello"))).status
            answer = await client.ask(do("echo", b"%d" % number))
            assert b"%d" % number == answer.body

    assert 1 == sum(data.startswith(b"POST") for data in general)


@pytest.mark.parametrize(
    "request_",
    [
        do("echo", b"abc", ("Expect", "nothing")),
        do("echo", b"abc", ("Content-Encoding", "identity")),
        do("echo", b"abc", ("Sec-Fetch-Site", "same-origin")),
        do("echo", b"abc", ("X-Long", "x" * 5000)),
        do("echo", bytes(INLINE_BYTES + 1)),
        do("echo", bytes(MAX_BYTES)),
        message("POST", "/do/echo", ("Transfer-Encoding", "chunked"), length=None) + chunked(b"a"),
    ],
)
async def test_what_is_not_plain_goes_the_general_path(
    address: str, desk: Desk, request_: bytes
) -> None:
    async with connect(address) as client:
        answers = [await client.ask(request_) for _ in range(3)]

    assert [200] * 3 == [answer.status for answer in answers]
    assert answers[0].body == answers[1].body == answers[2].body
    assert 3 == desk.handled


async def test_a_connection_that_is_to_be_closed_is(address: str) -> None:
    for _ in range(3):
        async with connect(address) as client:
            answer = await client.ask(do("echo", b"abc", ("Connection", "close")))
            assert (b"abc", b"") == (answer.body, await client.ended())
            assert "close" == answer.headers["connection"]


async def test_http_1_0_is_closed_as_it_asks(address: str) -> None:
    request = do("echo").replace(b"HTTP/1.1", b"HTTP/1.0")
    for _ in range(3):
        async with connect(address) as client:
            answer = await client.ask(request)
            assert (b"abc", b"") == (answer.body, await client.ended())


async def test_other_requests_come_between(address: str, general: list[bytes]) -> None:
    async with connect(address) as client:
        for number in range(3):
            echo = await client.ask(do("echo", b"%d" % number))
            hello = await client.ask(message("GET", "/hello"))
            head = await client.ask(message("HEAD", "/hello"), head=True)
            big = await client.ask(do("echo", bytes(200_000)))
            assert [b"%d" % number, b'"hello"'] == [echo.body, hello.body]
            assert (200, 200_000) == (head.status, len(big.body))

    assert 1 == sum(b"Content-Length: 1\r\n" in data for data in general)


async def test_lengths_and_traces_may_differ(address: str, general: list[bytes]) -> None:
    async with connect(address) as client:
        for number in range(1, 200):
            traced = [("Traceparent", f"00-{number}"), ("X-Request-ID", str(number))]
            body = b"x" * number
            assert body == (await client.ask(do("echo", body, *traced[: number % 3]))).body

    assert 1 == len(general)


async def test_few_heads_may_be_known(desk: Desk) -> None:
    async with serving(desk, max_heads=1) as (address, _), connect(address) as client:
        for number in range(9):
            body = b"x" * (number % 3)
            assert body == (await client.ask(do("echo", body))).body


# # --- consecutive requests ----------------------------------------------------------------------


async def test_what_is_sent_at_once_is_answered_in_turn(address: str) -> None:
    requests = [do("echo", b"%d" % n) for n in range(50)]
    requests[20] = message("GET", "/hello")
    requests[30] = do("echo", bytes(100_000))
    async with connect(address) as client:
        await teach(client, do("echo", b"x"))
        await client.send(b"".join(requests))
        bodies = [(await client.answer()).body for _ in requests]

    expected = [b"%d" % n for n in range(50)]
    expected[20], expected[30] = b'"hello"', bytes(100_000)
    assert expected == bodies


async def test_what_comes_while_a_request_waits_is_answered_after_it(
    address: str, desk: Desk
) -> None:
    async with connect(address) as client:
        await client.send(do("wait"))
        await desk.entered.wait()
        desk.answer()
        assert b"abc" == (await client.answer()).body
        await teach(client, do("echo", b"1"))
        desk.entered.clear()
        ahead = [do("echo", b"%d" % (n % 10)) for n in range(2000)]
        await client.send(do("wait") + ahead[0] + message("GET", "/hello"))
        await desk.entered.wait()
        await client.send(b"".join(ahead))
        desk.answer()
        bodies = [(await client.answer()).body for _ in range(3 + len(ahead))]

    assert [b"abc", b"0", b'"hello"'] == bodies[:3]
    assert [b"%d" % (n % 10) for n in range(2000)] == bodies[3:]


async def test_what_comes_while_aiohttp_answers_does_not_stay_with_it(
    address: str, desk: Desk, general: list[bytes]
) -> None:
    """A client may get its answer, and send again, before aiohttp has finished its request."""
    async with connect(address) as client:
        await teach(client, do("echo", b"1"))
        for _ in range(3):
            desk.entered.clear()
            await client.send(message("POST", "/do/wait", ("Expect", "nothing"), body=b"abc"))
            await desk.entered.wait()
            await client.send(do("echo", b"2"))
            # The answer on another connection shows that the server has read the earlier bytes.
            async with connect(address) as other:
                assert b"3" == (await other.ask(do("echo", b"3"))).body
            desk.answer()
            assert [b"abc", b"2"] == [(await client.answer()).body for _ in range(2)]
        assert b"4" == (await client.ask(do("echo", b"4"))).body

    assert 1 == sum(data.startswith(b"POST /do/echo") for data in general)
    assert 4 == desk.handled


async def test_a_body_may_come_after_its_head(address: str, general: list[bytes]) -> None:
    async with connect(address) as client:
        await teach(client, do("echo"))
        for _ in range(3):
            head, _, body = do("echo").partition(ENDS.encode())
            await client.send(head + ENDS.encode())
            # The server serves another connection first, so that it has seen the head.
            async with connect(address) as other:
                await other.ask(message("GET", "/hello"))
            assert body == (await client.ask(body)).body
        # No timer is left that would mistake the next body for one that never comes.
        timers = [one for one in scheduled() if not one.cancelled()]

    assert 1 == sum(data.startswith(b"POST") for data in general)
    assert [] == [one for one in timers if "hand_over" in repr(one)]


def scheduled() -> list[asyncio.TimerHandle]:
    """Return the timers of the test's event loop, which the server shares."""
    loop: Any = asyncio.get_running_loop()
    return list(loop._scheduled)


async def test_a_body_that_does_not_come_is_refused_and_may_come_late(desk: Desk) -> None:
    async with serving(desk, timeout=0.2) as (address, _), connect(address) as client:
        await teach(client, do("echo"))
        await client.send(do("echo")[:-1])
        refused = await client.answer()
        await client.send(b"c" + do("echo", b"xyz"))
        again = await client.answer()

    assert 408 == refused.status
    assert "message_timeout_seconds" in refused.error
    assert (200, b"xyz") == (again.status, again.body)


# --- the ends of connections -------------------------------------------------------------------


async def waiting(client: Client, desk: Desk) -> None:
    """Have a request wait on the fast path."""
    await client.send(do("wait"))
    await desk.entered.wait()
    desk.answer()
    await client.answer()
    desk.entered.clear()
    desk.cancelled.clear()
    await client.send(do("wait"))
    await desk.entered.wait()


async def test_a_client_that_leaves_cancels_its_request(
    address: str, desk: Desk, general: list[bytes]
) -> None:
    async with connect(address) as client:
        await waiting(client, desk)
        assert 1 == len(general)
    async with asyncio.timeout(10):
        await desk.cancelled.wait()


async def test_a_request_that_waits_is_answered_before_the_server_ends(desk: Desk) -> None:
    async with serving(desk) as (address, server), connect(address) as client:
        await waiting(client, desk)
        async with connect(address) as idle:
            await idle.ask(message("GET", "/hello"))
            draining = asyncio.ensure_future(server.drain(10))
            assert b"" == await idle.ended()
        desk.answer()
        answer = await client.answer()
        rest = await client.ended()
        await draining

    assert (200, b"abc", b"") == (answer.status, answer.body, rest)
    assert not desk.cancelled.is_set()


async def test_a_request_that_waits_too_long_is_cut_off(desk: Desk) -> None:
    async with serving(desk) as (address, server), connect(address) as client:
        await waiting(client, desk)
        await server.drain(0.1)
        rest = await client.ended()

    assert b"" == rest
    assert desk.cancelled.is_set()


async def test_a_connection_is_closed_when_nothing_follows_its_answer(desk: Desk) -> None:
    async with serving(desk, idle=0.2) as (address, _), connect(address) as client:
        await teach(client, do("echo"))
        await client.ask(do("echo"))
        rest = await client.ended()

    assert b"" == rest


async def test_a_connection_is_not_idle_while_its_request_waits(desk: Desk) -> None:
    async with serving(desk, idle=0.2) as (address, _), connect(address) as client:
        await waiting(client, desk)
        for _ in range(2):
            async with connect(address) as idle:
                assert b"" == await idle.ended()
        desk.answer()
        answer = await client.answer()
        rest = await client.ended()

    assert (200, b"") == (answer.status, rest)


async def test_a_reader_that_is_slow_gets_everything(address: str) -> None:
    count = 200
    async with connect(address) as client:
        await teach(client, do("large"))
        sending = asyncio.ensure_future(client.send(do("large") * count))
        answers = [len((await client.answer()).body) for _ in range(count)]
        await sending

    assert [len(LARGE) + 8] * count == answers


# # --- the fast path in isolation
# ------------------------------------------------------------------


class Wire(asyncio.Transport):
    """A transport that records the output."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reading = True
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


class Owner:
    """A connection that consists of the fast path alone."""

    def __init__(
        self, desk: Desk, *, known: tuple[str, ...] = ("echo", "wait"), limit: int = 1 << 30
    ) -> None:
        self.wire = Wire()
        self.others: list[bytes] = []
        self.server: Any = SimpleNamespace(is_draining=False)
        plans = Plans(100, INLINE_BYTES)
        for what in known:
            head = do(what)[: -len(b"abc")]
            begin = desk.prepare(HttpRequest({"what": what}))
            plans.keep(head, Plan("POST", f"/do/{what}", 3, begin))
        self.held = Held(Ledger(limit).open(), self.wire)
        self.peer = NOBODY
        self.fast = FastPath(plans, self, self.wire, 30.0)

    def take_over(self, data: bytes) -> None:
        self.others.append(data)

    def force_close(self) -> None:
        self.wire.close()

    @property
    def answers(self) -> int:
        return self.wire.written.count(b"HTTP/1.1 ")

    @property
    def bodies(self) -> list[bytes]:
        return [part[:3] for part in self.wire.written.split(ENDS.encode())[1:]]


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
async def test_a_body_may_come_in_any_pieces_and_more_behind_it(desk: Desk, step: int) -> None:
    owner = Owner(desk)
    owner.fast.receive(do("echo")[:-3])
    rest = b"xyz" + do("echo", b"uvw")
    pieces = [rest[start : start + step] for start in range(0, 3, step)]
    pieces[-1] += rest[sum(map(len, pieces)) :]
    for piece in pieces:
        owner.fast.receive(piece)
    while owner.fast.state is not State.IDLE:
        await asyncio.sleep(0)

    assert ([b"xyz", b"uvw"], []) == (owner.bodies, owner.others)


async def test_a_head_that_is_not_complete_goes_the_general_path(desk: Desk) -> None:
    owner = Owner(desk)
    owner.fast.receive(do("echo")[:20])

    assert [do("echo")[:20]] == owner.others
    assert owner.fast.state is State.GENERAL


async def test_a_client_that_sends_ahead_is_stopped(desk: Desk) -> None:
    owner = Owner(desk)
    owner.fast.receive(do("wait"))
    ahead = do("echo") * 3000
    for start in range(0, len(ahead), 1000):
        owner.fast.receive(ahead[start : start + 1000])
        if not owner.wire.reading:
            break
    else:
        pytest.fail("it was never stopped")
    desk.answer()
    while owner.fast.state in (State.EXECUTING, State.QUEUED):
        await asyncio.sleep(0)

    assert owner.wire.reading
    assert 64 < owner.answers


async def test_a_client_that_sends_ahead_of_aiohttp_is_stopped_again(desk: Desk) -> None:
    """aiohttp resumes reading after its handler has read a large body."""
    owner = Owner(desk)
    owner.fast.change(Input.GENERAL_BEGUN)
    owner.fast.change(Input.GENERAL_WHOLE)
    for _ in range(2):
        owner.wire.resume_reading()
        for _ in range(300):
            owner.fast.receive(do("echo") * 10)
            if not owner.wire.reading:
                break
        assert not owner.wire.reading
    owner.fast.return_from_general()
    while owner.fast.state is State.QUEUED:
        await asyncio.sleep(0)

    assert owner.wire.reading
    assert 64 < owner.answers


async def test_whoever_takes_what_was_sent_ahead_may_stop_the_client_in_its_turn(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner(desk)
    monkeypatch.setattr(owner, "take_over", lambda data: owner.wire.pause_reading())
    owner.fast.receive(do("wait"))
    while owner.wire.reading:
        owner.fast.receive(b"GET /hello HTTP/1.1\r\nHost: a\r\n\r\n" * 30)
    desk.answer()
    while owner.fast.state is not State.GENERAL:
        await asyncio.sleep(0)

    assert not owner.wire.reading


async def test_nothing_is_begun_while_answers_do_not_leave(desk: Desk) -> None:
    owner = Owner(desk)
    owner.fast.change(Input.PAUSE)
    owner.fast.receive(do("echo"))
    owner.fast.receive(do("echo"))
    await asyncio.sleep(0)
    before = owner.answers
    owner.fast.resume()
    while owner.fast.state is not State.IDLE:
        await asyncio.sleep(0)

    assert (0, 2) == (before, owner.answers)


async def test_what_waits_for_its_execution_is_on_the_ledger_until_it_is_answered(
    desk: Desk,
) -> None:
    owner = Owner(desk)
    account = owner.held.account
    owner.fast.receive(do("wait", bytes(3)))
    held = account.held
    owner.fast.receive(do("echo"))  # counted as bytes received ahead
    ahead = account.held
    desk.answer()
    while owner.fast.state is not State.IDLE:
        await asyncio.sleep(0)

    assert 3 * 12 == held < ahead
    assert (0, 0) == (account.held, account.ledger.held)


async def test_under_pressure_a_short_body_is_asked_for_too(desk: Desk) -> None:
    owner = Owner(desk, limit=1 << 10)
    other = owner.held.account.ledger.open()
    other.hold(1 << 9)
    owner.fast.receive(do("echo"))
    assert (1, []) == (owner.answers, owner.others)  # the fast path needs no memory for it
    other.hold(3 << 7)

    owner.fast.receive(do("echo"))
    assert (1, [do("echo")]) == (owner.answers, owner.others)
    assert owner.fast.state is State.GENERAL


async def test_nothing_is_begun_on_a_connection_that_closes(desk: Desk) -> None:
    """RFC 9112, 9.6: the last answer announces the close, and later requests are ignored."""
    owner = Owner(desk)
    owner.fast.receive(do("wait") + do("echo"))
    owner.server.is_draining = True
    desk.answer()
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert (1, True) == (owner.answers, owner.wire.closed)
    assert b"\r\nConnection: close\r\n" in owner.wire.written


async def test_what_is_left_when_a_connection_ends_is_forgotten(desk: Desk) -> None:
    half, whole = Owner(desk), Owner(desk)
    half.fast.receive(do("echo")[:-1])
    half.fast.end(Input.LOST)
    whole.fast.receive(do("wait") + do("echo"))
    whole.fast.end(Input.LOST)
    await asyncio.sleep(0)

    assert desk.cancelled.is_set()
    assert (0, b"") == (whole.answers, whole.wire.written)
    assert (0, b"") == (half.answers, half.wire.written)


async def test_a_request_whose_model_fails_later_is_refused(desk: Desk) -> None:
    owner = Owner(desk)
    for error in (ModelNotFound("m"), ZeroDivisionError("secret")):
        owner.fast.receive(do("wait"))
        _, done = desk.waiting.pop()
        done(error)

    assert b"HTTP/1.1 404 Not Found" in owner.wire.written
    assert b'{"error":"internal error"}' in owner.wire.written
    assert b"secret" not in owner.wire.written


async def test_a_request_that_is_cancelled_ends_its_connection(desk: Desk) -> None:
    owner = Owner(desk)
    owner.fast.receive(do("wait"))
    _, done = desk.waiting.pop()
    done(asyncio.CancelledError())

    assert (b"", True) == (owner.wire.written, owner.wire.closed)
