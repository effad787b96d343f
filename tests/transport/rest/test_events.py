"""Server-sent events: one request, many answers (HTML, section 9.2)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.events import EventReader
from support.gate_watch import RULE, Watch
from support.gateway import serving_routes
from support.http import SECONDS, connect, message

from xlaserve.errors import Overloaded
from xlaserve.http.connection import drain
from xlaserve.http.connection.bodies import BodyLimits
from xlaserve.http.connection.server import HttpLimits, HttpServer
from xlaserve.http.events import EVENT_STREAM_TYPE, EventCall, events, wants_events
from xlaserve.http.json.json_tensors import JsonRules
from xlaserve.http.messages import HttpRequest, HttpResponse, HttpStream
from xlaserve.http.routing import Route, RouteTable
from xlaserve.http.v2.infer_response import write_infer_answer
from xlaserve.net.ledger import Ledger
from xlaserve.serving.call import NO_HEADERS, NOBODY, Operation
from xlaserve.serving.gates import Gates
from xlaserve.serving.inference import InferOutput, InferRequest, InferResponse
from xlaserve.tensors import datatype_named

FP32 = datatype_named("FP32")
MAX_BYTES = 1 << 16
MORE_BYTES = 1 << 10
"""More bytes than an event has in addition to its numbers."""
ASK = message("POST", "/generate", ("Accept", EVENT_STREAM_TYPE), body=b"{}")


def response(number: float, count: int = 1, identity: str = "") -> InferResponse:
    output = InferOutput("y", FP32, np.full(count, number, np.float32))
    return InferResponse("m", "1", identity, (output,))


async def encode(given: InferResponse) -> HttpResponse:
    return write_infer_answer(InferRequest("m"), given, JsonRules(strict=True))


@dataclass
class Model:
    """A model that gives a fixed number of answers as fast as its client reads."""

    answers: int | None = 3
    """None for an endless stream."""
    count: int = 1
    """Elements per answer."""
    obeys: bool = True
    """Whether it respects backpressure."""
    error: Exception | None = None
    """Raised instead of the last answer."""
    step: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1 << 20))
    """Acquired once for each answer."""
    given: int = 0
    calls: list[EventCall] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, call: EventCall) -> None:
        try:
            while self.answers is None or self.given < self.answers:
                await self.step.acquire()
                self.given += 1
                last = self.given == self.answers
                if last and self.error is not None:
                    call.fail(self.error)
                    return
                call.answer(response(self.given, self.count), last=last)
                if call.has_ended:
                    return
                if self.obeys:
                    await call.writable()
                else:
                    await asyncio.sleep(0)
        finally:
            self.ended.set()

    async def handle(self, request: HttpRequest) -> HttpStream:
        await request.read()
        call = request.call
        assert isinstance(call, EventCall)
        call.grow = request.grow
        self.calls.append(call)
        self.task = asyncio.ensure_future(self.generate(call))
        parts = events(call, encode, "POST", "/generate")
        return HttpStream(EVENT_STREAM_TYPE, parts)


@asynccontextmanager
async def serving(
    model: Model, *, ledger: Ledger | None = None, gates: Gates | None = None
) -> AsyncIterator[tuple[str, HttpServer]]:
    make_call = partial(EventCall, max_bytes=MAX_BYTES)
    routes = RouteTable(
        [
            Route(
                "POST",
                "/generate",
                Operation.INFER,
                model.handle,
                "generate",
                "test",
                make_call=make_call,
            )
        ]
    )
    limits = HttpLimits(20, 1 << 14, 30.0, BodyLimits(1 << 20, 100, 30.0), 100)
    async with serving_routes(routes, limits, ledger, gates=gates) as served:
        yield served


def answer(number: int, *, last: bool, count: int = 1) -> Any:
    output = {"name": "y", "datatype": "FP32", "shape": [count], "data": [float(number)] * count}
    return (
        "message",
        {
            "model_name": "m",
            "model_version": "1",
            "outputs": [output],
            "parameters": {"triton_final_response": last},
        },
    )


# --- events ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 200])
async def test_each_answer_is_an_event_and_the_last_one_says_so(count: int) -> None:
    model = Model(count)
    async with serving(model) as (address, _), connect(address) as client:
        for _ in range(2):  # and the connection continues
            model.given = 0
            reader = EventReader(client)
            await client.send(ASK)
            await reader.head()
            found = await reader.events()

            assert EVENT_STREAM_TYPE == reader.headers["content-type"]
            assert "no-store" == reader.headers["cache-control"]
            assert [answer(n, last=n == count) for n in range(1, count + 1)] == found


async def test_an_answer_is_sent_as_it_comes() -> None:
    """It is not delayed until the next answer or the end."""
    model = Model(3, step=asyncio.Semaphore(0))
    async with serving(model) as (address, _), connect(address) as client:
        reader = EventReader(client)
        await client.send(ASK)
        for number in (1, 2, 3):
            model.step.release()
            if number == 1:
                await reader.head()
            assert answer(number, last=number == 3) == await reader.event()
            assert number == model.given
        assert await reader.event() is None


async def test_an_error_before_the_first_answer_has_its_status() -> None:
    model = Model(1, error=Overloaded("m", 3, "max_requests_per_model"))
    async with serving(model) as (address, _), connect(address) as client:
        found = await client.ask(ASK)

    assert 503 == found.status
    assert "'m'" in found.error


async def test_an_error_behind_an_answer_is_the_last_event() -> None:
    """An unexpected error reveals no details; the connection continues."""
    model = Model(2, error=ZeroDivisionError("secret"))
    async with serving(model) as (address, _), connect(address) as client:
        for _ in range(2):
            model.given = 0
            reader = EventReader(client)
            await client.send(ASK)
            await reader.head()
            found = await reader.events()

            assert [answer(1, last=False), ("error", {"error": "internal error"})] == found


async def test_an_answer_that_cannot_be_written_is_an_error_and_cancels_the_rest() -> None:
    model = Model(None)
    async with serving(model) as (address, _), connect(address) as client:
        reader = EventReader(client)

        def infinite(number: float, count: int = 1, identity: str = "") -> InferResponse:
            return original(np.inf if number > 2 else number, count)

        original = response
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "response", infinite)
            await client.send(ASK)
            await reader.head()
            found = await reader.events()
            async with asyncio.timeout(SECONDS):
                await model.ended.wait()

    assert ["message", "message", "error"] == [name for name, _ in found]
    assert "strict_json" in found[-1][1]["error"]
    assert model.calls[0].is_cancelled


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (None, False),
        ("*/*", False),
        ("application/json", False),
        ("text/event-stream", True),
        ("TEXT/Event-Stream; q=0.5", True),
        ("text/event-stream, */*;q=0.1", True),
        ("application/json, text/event-stream;q=0.9", False),
        ("text/event-stream;q=0", False),
        ("text/*", True),
    ],
)
def test_who_would_rather_have_events(accept: str | None, *, wanted: bool) -> None:
    assert wanted == wants_events({"accept": accept} if accept else {})


# --- backpressure ------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_client_that_does_not_read_pauses_the_model() -> None:
    """Buffered events are bounded, and all of them arrive once it reads."""
    total, count = 400, 20_000
    model, ledger = Model(total, count), Ledger(1 << 30)
    async with serving(model, ledger=ledger) as (address, _), connect(address) as client:
        reader = EventReader(client)
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(ASK)
        given = -1
        while given != model.given or not given:
            given = model.given
            async with asyncio.timeout(SECONDS):
                await settle()
        paused, held = model.given, ledger.held
        client.reader._transport.resume_reading()  # type: ignore[attr-defined]
        await reader.head()
        found = await reader.events()

    assert paused < total // 2
    # One answer waits as arrays and one as an event that is being sent, plus the unread bytes.
    event = count * len(f"{total}.0,") + MORE_BYTES
    assert held <= MAX_BYTES + 4 * count + 2 * event
    assert total == len(found) == model.given
    assert 0 == ledger.held


async def settle() -> None:
    """Run the loop until idle: the kernel takes the contents of its buffers in several steps."""
    for _ in range(200):
        await asyncio.sleep(0.001)


async def test_a_model_that_does_not_pause_is_stopped_by_the_ledger() -> None:
    model, ledger = Model(None, 20_000, obeys=False), Ledger(4 << 20)
    async with serving(model, ledger=ledger) as (address, _), connect(address) as client:
        reader = EventReader(client)
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(ASK)
        async with asyncio.timeout(SECONDS):
            await model.ended.wait()
        assert ledger.held <= 4 << 20
        client.reader._transport.resume_reading()  # type: ignore[attr-defined]
        await reader.head()
        name, data = (await reader.events())[-1]

    assert "error" == name
    assert not model.calls[0].is_cancelled  # the request has failed
    assert "max_held_bytes" in data["error"]
    assert 0 == ledger.held


def test_a_call_takes_no_more_answers_than_may_wait() -> None:
    async def scenario() -> list[bool]:
        call = EventCall({}, NO_HEADERS, NOBODY, 8)
        found = [call.is_writable]
        for last in (False, False, True):
            call.answer(response(1), last=last)
            found.append(call.is_writable)
        async for _ in call.answers():
            found.append(call.is_writable)
        return found

    assert [True, True, False, False, False, False, True] == asyncio.run(scenario())


# # --- endings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "does not read"])
async def test_a_client_that_leaves_cancels_the_call(*, reads: bool) -> None:
    """Even while the model waits for it; all its reservations are released."""
    model, watch, ledger = Model(None, 20_000), Watch(), Ledger(1 << 30)
    gates = Gates(observers=[watch])
    async with serving(model, ledger=ledger, gates=gates) as (address, _):
        async with connect(address) as client:
            await client.send(ASK)
            if reads:
                await EventReader(client).head()
            else:
                client.reader._transport.pause_reading()  # type: ignore[attr-defined]
                while not (model.calls and not model.calls[0].is_writable):
                    await asyncio.sleep(0)
            client.writer.transport.abort()
        async with asyncio.timeout(SECONDS):
            await model.ended.wait()
            while ledger.held:
                await asyncio.sleep(0)
        (call,) = model.calls

    assert call.is_cancelled
    assert [call] == watch.begun == watch.ended_calls


async def test_a_stream_that_is_refused_is_an_ordinary_answer() -> None:
    model, watch = Model(3), Watch()
    refuse = message("POST", "/generate", (RULE, "refuse"), body=b"{}")
    gates = Gates(permission=watch.permit, observers=[watch])
    async with serving(model, gates=gates) as (address, _), connect(address) as client:
        found = await client.ask(refuse)

    assert 403 == found.status
    assert not model.calls
    assert watch.begun == watch.ended_calls == watch.gate


async def test_a_drain_lets_a_stream_end_and_closes_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drain, "_IDLE_SECONDS", 2 * SECONDS)
    model = Model(4, step=asyncio.Semaphore(1))
    async with serving(model) as (address, server), connect(address) as client:
        reader = EventReader(client)
        await client.send(ASK)
        await reader.head()
        first = await reader.event()
        draining = asyncio.ensure_future(server.drain(SECONDS))
        await asyncio.sleep(0)
        for _ in range(3):
            model.step.release()
        rest = await reader.events()
        ended = await client.ended()
        await draining

    assert [answer(n, last=n == 4) for n in range(1, 5)] == [first, *rest]
    assert b"" == ended


async def test_a_stream_without_an_end_is_told_when_the_grace_is_over() -> None:
    model = Model(None, step=asyncio.Semaphore(1))
    async with serving(model) as (address, server), connect(address) as client:
        reader = EventReader(client)
        await client.send(ASK)
        await reader.head()
        await reader.event()
        async with asyncio.timeout(SECONDS):
            await server.drain(0.05)
        (name, data), *others = await reader.events()
        ended = await client.ended()
        model.task.cancel()

    assert ("error", "the server is shutting down, try again") == (name, data["error"])
    assert ([], b"") == (others, ended)


async def test_what_ends_a_call_elsewhere_ends_its_stream() -> None:
    model = Model(None, step=asyncio.Semaphore(1))
    async with serving(model) as (address, _), connect(address) as client:
        reader = EventReader(client)
        await client.send(ASK)
        await reader.head()
        await reader.event()
        model.calls[0].cancel("an operator said so")
        ended = await client.ended()
        model.task.cancel()

    assert b"0\r\n\r\n" not in ended


async def test_a_large_event_counts_while_it_is_sent() -> None:
    """It counts in addition to its tensors until the next answer is requested."""
    tensor, grown = 4 * 50_000, list[int]()
    call = EventCall({}, NO_HEADERS, NOBODY, 1 << 30)
    call.grow = lambda count, what: grown.append(count)
    for last in (False, True):
        call.write(response(1.5, 50_000), last=last)
    parts = events(call, encode, "POST", "/generate")

    event = await anext(parts)
    assert sum(grown) == 2 * tensor + len(event)
    event = await anext(parts)
    assert sum(grown) == tensor + len(event)
    assert await anext(parts, None) is None
    assert sum(grown) == tensor
