"""A failing request does not fail others in its batch, on every station."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from support import scripted_language, tiny_embedding
from support.conditions import until
from support.fronts import front_of
from support.gated import (
    BAD,
    DEATH,
    ENSEMBLES,
    PANIC,
    ROWS,
    SEQUENCES,
    Gate,
    Panic,
    Row,
    Station,
    gate,
    pass_gate,
    row,
)
from support.http import Answer, ask
from support.server import RunningServer, Serve
from tritonclient.utils import InferenceServerException

from xlaserve.generation.batch import Batch
from xlaserve.generation.running import Running
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inputs.output_forms import OutputForms
from xlaserve.serving.stations import apart

BAD_TEXT, BAD_LENGTH = "c", 13
"""Text that makes an embedding fail, and max_tokens that makes text generation fail."""

THROUGH_A_FRONT_END = "through a front end"
WAYS = ("as it comes", THROUGH_A_FRONT_END)

GATHERING = [
    pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.is_slow else [])
    for one in (*ROWS, *ENSEMBLES)
    if one.gathers or one.step_of
]

ALONE = [
    pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.is_slow else [])
    for one in ROWS
    if not one.gathers
]


@asynccontextmanager
async def loaded(
    row: Row,
    root: Path,
    server: RunningServer,
    opened: Gate,
    way: str,
    **batching: Any,
) -> AsyncIterator[Station]:
    """Load the model of a row for the duration of a block, reached directly or via a front end."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(triton.InferenceServerClient(server.url))
        station = Station(server, client, opened, row)
        fronts = None
        if way == THROUGH_A_FRONT_END:
            front, fronts = await stack.enter_async_context(front_of(server, root.parent))
            station.url = front.url
            station.asks = await stack.enter_async_context(triton.InferenceServerClient(front.url))
        await station.load(root, 4, **batching)
        if fronts is not None:
            await fronts.mirror.shown()
        yield station


def another_client(station: Station) -> Any:
    """Return a client with its own connection."""
    return triton.InferenceServerClient(station.url, channel_args=[("of", "the bad one")])


@asynccontextmanager
async def asked_at(
    server: RunningServer, scratch: Path, way: str
) -> AsyncIterator[Callable[[str, Any], "asyncio.Task[Answer]"]]:
    """Yield a function that sends HTTP requests, directly or via a front end."""
    async with AsyncExitStack() as stack:
        at = server
        if way == THROUGH_A_FRONT_END:
            at, _ = await stack.enter_async_context(front_of(server, scratch))
        yield lambda path, body: asyncio.ensure_future(
            ask(str(at.http), "POST", path, body=json.dumps(body).encode())
        )


async def gathered(station: Station, *values: float) -> "list[float | BaseException]":
    """Queue requests together; return their answers, and the errors of those that fail."""
    asked = await station.busy()
    for count, value in enumerate(values, 1):
        asked.append(station.ask(value))
        await station.pending(count)
    station.gate.free(99)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    return answers[-len(values) :]


def shown(answers: "list[float | BaseException]") -> "list[float | str]":
    return ["failed" if isinstance(one, BaseException) else one for one in answers]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", GATHERING)
async def test_one_bad_request_fails_alone(
    row: Row, way: str, serve: Serve, tmp_path: Path
) -> None:
    """A failed batch is retried request by request, every time; the same holds for panics."""
    root = tmp_path / "models"
    root.mkdir()
    async with (
        gate(tmp_path / "gate") as opened,
        serve(root, allow_python_models=True) as server,
        # A negligible delay: it keeps requests in the queue until they can be executed.
        loaded(row, root, server, opened, way, max_queue_delay_microseconds=1) as station,
    ):
        first = await gathered(station, 1, BAD, 3, 4)
        executed = [one for one in opened.executed if 0.0 not in one]
        await station.idle()
        second = await gathered(station, 1, PANIC, 3, 4)
        again = [one for one in opened.executed if 0.0 not in one]

    assert [2.0, "failed", 6.0, 8.0] == shown(first) == shown(second)
    assert [[1, BAD, 3, 4], [1], [BAD], [3], [4]] == executed
    assert [[1, PANIC, 3, 4], [1], [PANIC], [3], [4]] == again


LANES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "two copies": ("jax", {"copies": 2}),
    "two devices": ("jax", {"devices": (0, 1)}),
    "two copies of code": ("own, batched", {"copies": 2}),
    "two copies of triton": ("triton", {"copies": 2}),
}
"""Models that execute two batches at a time: the row, and how to load it."""

QUICK_LANES = {
    "two copies": WAYS[0],
    "two devices": THROUGH_A_FRONT_END,
    "two copies of code": WAYS[0],
}
"""The way each model is asked in quick runs; its other ways are similar."""


def lanes_and_ways() -> "Iterator[Any]":
    for lanes, way in product(LANES, WAYS):
        marks = [] if QUICK_LANES.get(lanes) == way else [pytest.mark.slow]
        yield pytest.param(lanes, way, marks=marks)


@pytest.mark.parametrize(("lanes", "way"), [*lanes_and_ways()])
async def test_one_bad_request_fails_alone_beside_another_lane(
    lanes: str, way: str, serve: Serve, tmp_path: Path
) -> None:
    """Each request is executed once in a batch, and once alone on either lane."""
    root = tmp_path / "models"
    root.mkdir()
    name, how = LANES[lanes]
    both = replace(row(name), in_progress=2)
    how = {"max_queue_delay_microseconds": 1, **how}
    async with (
        gate(tmp_path / "gate") as opened,
        serve(root, allow_python_models=True) as server,
        loaded(both, root, server, opened, way, **how) as station,
    ):
        found = []
        for bad in (BAD, PANIC):
            answers = await gathered(station, 1, bad, 3, 4)
            found.append((shown(answers), sorted(one for one in opened.executed if 0.0 not in one)))
            await station.idle()

    for bad, (answers_, executed) in zip((BAD, PANIC), found, strict=True):
        assert [2.0, "failed", 6.0, 8.0] == answers_
        wanted: list[list[float]] = [[1, bad, 3, 4], [1], [bad], [3], [4]]
        assert sorted(wanted) == executed


@pytest.mark.parametrize(
    "lanes",
    [pytest.param(n, marks=[] if n in QUICK_LANES else [pytest.mark.slow]) for n in LANES],
)
async def test_a_client_that_fails_others_has_a_quarter_of_all_lanes(
    lanes: str, serve: Serve, tmp_path: Path
) -> None:
    """Regardless of the number of lanes, three batches of others begin before its next one."""
    root = tmp_path / "models"
    root.mkdir()
    name, how = LANES[lanes]
    both = replace(row(name), in_progress=2)
    async with (
        gate(tmp_path / "gate") as opened,
        serve(root, allow_python_models=True) as server,
        loaded(both, root, server, opened, "", max_queue_delay_microseconds=1, **how) as station,
        another_client(station) as bad,
    ):
        asked = await station.busy()
        for count, value in enumerate((BAD, 1), 1):
            asked.append(station.ask(value, client=bad if value == BAD else None))
            await station.pending(count)
        opened.free(99)
        await asyncio.gather(*asked, return_exceptions=True)
        await station.idle()
        asked = await station.busy()
        goods = range(1, 33)
        for count, value in enumerate((BAD, BAD, *goods), 1):
            asked.append(station.ask(value, client=bad if value == BAD else None))
            await station.pending(count)
        begun = len(opened.executed)
        while len(opened.executed) < begun + 9:  # one by one, so that the order is known
            before = len(opened.executed)
            opened.free(1)
            await station.until(
                lambda of=before: len(opened.executed) > of  # type: ignore[misc]
            )
        opened.free(99)
        answers = await asyncio.gather(*asked, return_exceptions=True)

    assert [2.0 * value for value in goods] == answers[-len(goods) :]
    order = ["bad" if BAD in one else "good" for one in opened.executed[begun : begun + 9]]
    assert [] == [one for one in opened.executed[begun:] if BAD in one and len({*one}) > 1]
    assert [*("bad", "good", "good", "good") * 2, "bad"] == order


@pytest.mark.parametrize("row", ALONE)
async def test_a_panic_is_one_requests(row: Row, serve: Serve, tmp_path: Path) -> None:
    """Even without batches; the next request is answered."""
    root = tmp_path / "models"
    root.mkdir()
    async with (
        gate(tmp_path / "gate") as opened,
        serve(root, allow_python_models=True) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        opened.free(99)
        station = Station(server, client, opened, row)
        await station.load(root)
        async with asyncio.timeout(60):
            failed = await asyncio.gather(station.ask(PANIC), return_exceptions=True)
            answers = [*failed, await station.ask(3)]

    assert ["failed", 3 * row.factor] == shown(answers)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", [pytest.param(one, id=one.name) for one in SEQUENCES])
@pytest.mark.parametrize("bad", [BAD, PANIC], ids=["raises", "panics"])
async def test_one_bad_sequence_fails_alone(
    row: Row, bad: float, way: str, serve: Serve, tmp_path: Path
) -> None:
    """Other sequences in its batch get their answers and continue."""
    root = tmp_path / "models"
    root.mkdir()
    async with (
        gate(tmp_path / "gate") as opened,
        serve(root, allow_python_models=True) as server,
        loaded(row, root, server, opened, way) as station,
    ):
        asked = [station.ask(0, sequence_id=1, sequence_start=True)]
        await station.until(lambda: opened.held > 0)
        for number, value in enumerate((1, bad, 3), 2):
            asked.append(station.ask(value, sequence_id=number, sequence_start=True))
            await station.in_progress(number)
        opened.free(99)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        going = [station.ask(5, sequence_id=number) for number in (1, 2, 4)]
        after = await asyncio.gather(*going, return_exceptions=True)
        executed = [*opened.executed]
        await station.idle()  # no reference keeps the model from being unloaded

    assert [0.0, 2.0, "failed", 6.0] == shown(answers)
    assert [[1, bad, 3], [1], [bad], [3]] == executed[1:5]
    assert [10.0] * 3 == after


def gated_tokens(path: str, server: RunningServer) -> None:
    """Make executions of `words` wait at a gate; afterwards, those with `BAD_TEXT` fail."""
    runner: Any = server.application.registry.resolve("words")[1].runner
    inner = runner.execute
    bad = tiny_embedding.tokens_of(BAD_TEXT)[-1]

    def execute(inputs: Any, **how: Any) -> Any:
        rows = np.asarray(inputs["input_ids"])
        pass_gate(path, rows[:, 1])
        if bad in rows:
            raise Panic
        return inner(inputs, **how)

    runner.execute = execute
    runner.expected_seconds = lambda rows: 1.0  # never execute on the event loop
    server.gather("words", 4)


@pytest.mark.parametrize("way", WAYS)
async def test_one_bad_text_of_embeddings_fails_alone(
    way: str, serve: Serve, tmp_path: Path
) -> None:
    """Its row was in the same execution as the others."""
    root = tmp_path / "models"
    tiny_embedding.export(root / "words")
    texts = ["ab", BAD_TEXT, "ba", "b"]
    async with (
        gate(tmp_path / "gate") as opened,
        serve(root, load_model=("words",), http_endpoint="port:0") as server,
        asked_at(server, tmp_path, way) as asks,
    ):
        gated_tokens(opened.path, server)
        _, instance = server.application.registry.resolve("words")
        asked = [asks("/v1/embeddings", {"model": "words", "input": "a"})]
        await until(lambda: opened.held == 1)
        for count, text in enumerate(texts, 1):
            asked.append(asks("/v1/embeddings", {"model": "words", "input": text}))
            await until(lambda of=count: instance.pending == of)  # type: ignore[misc]
        opened.free(99)
        answers = (await asyncio.gather(*asked))[1:]

    assert [200, 500, 200, 200] == [answer.status for answer in answers]
    for text, answer in zip(texts, answers, strict=True):
        if text != BAD_TEXT:
            wanted = tiny_embedding.expected(tiny_embedding.tokens_of(text))
            assert np.allclose(wanted, answer.json["data"][0]["embedding"], atol=1e-6)
    assert 4 == max(map(len, opened.executed))


@pytest.mark.parametrize("way", WAYS)
async def test_one_bad_request_of_a_generator_fails_alone(
    way: str, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests in the same steps get all of their tokens."""
    root, told, script = tmp_path / "models", threading.Event(), "abcdefghijklmnopqrst"
    scripted_language.export(root / "story", [script], scripted_language.HERMES, slots="4")
    step, take = Batch.step, Running.take
    beside: list[int] = []

    def waits(batch: Batch) -> None:
        told.wait(60)
        step(batch)

    def takes(running: Running, *given: Any) -> bool:
        if running.parameters.max_tokens == BAD_LENGTH and len(running.output) == 2:
            beside.append(version.admission.in_progress)
            raise Panic
        return take(running, *given)

    async with (
        serve(root, load_model=("story",), http_endpoint="port:0") as server,
        asked_at(server, tmp_path, way) as asks,
    ):
        version = server.application.registry.version("story", "1")
        monkeypatch.setattr(Batch, "step", waits)
        monkeypatch.setattr(Running, "take", takes)
        asked = [
            asks("/v2/models/story/generate", {"text": "a0", "parameters": {"max_tokens": most}})
            for most in (12, BAD_LENGTH, 14)
        ]
        await until(lambda: version.admission.in_progress == 3)
        told.set()
        answers = await asyncio.gather(*asked)

    assert [200, 500, 200] == [answer.status for answer in answers]
    assert [script[:12], script[:14]] == [answers[at].json["text_output"] for at in (0, 2)]
    assert [3] == beside


async def test_other_clients_are_executed_together_and_first(serve: Serve, tmp_path: Path) -> None:
    """A client whose requests fail gets separate batches, at most a quarter of them."""
    root = tmp_path / "models"
    root.mkdir()
    async with (
        gate(tmp_path / "gate") as opened,
        serve(root, allow_python_models=True) as server,
        triton.InferenceServerClient(server.url) as good,
        triton.InferenceServerClient(server.url, channel_args=[("of", "the bad one")]) as bad,
    ):
        station = Station(server, good, opened, row("own, batched"))
        await station.load(root, 2, max_queue_delay_microseconds=1)
        asked = await station.busy()
        asked.append(station.ask(BAD, client=bad))
        await station.pending(1)
        asked.append(station.ask(1))
        await station.pending(2)
        opened.free(99)
        await asyncio.gather(*asked, return_exceptions=True)
        await station.idle()
        asked = await station.busy()
        for count, value in enumerate((BAD, BAD, BAD, 1, 2, 3, 4, 5, 6, 7, 8), 1):
            asked.append(station.ask(value, client=bad if value == BAD else good))
            await station.pending(count)
        opened.free(99)
        answers = await asyncio.gather(*asked, return_exceptions=True)

    assert [2.0 * value for value in range(1, 9)] == answers[-8:]
    expected = [[BAD, BAD], [1, 2], [3, 4], [5, 6], [BAD], [7, 8], [BAD], [BAD]]
    assert expected == opened.executed[1:]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["jax", "ragged", "triton"])
async def test_what_waits_of_a_client_that_is_found_out_fails_no_other_batch(
    name: str, way: str, serve: Serve, tmp_path: Path
) -> None:
    """Even if enqueued before the failing client was identified by the last row of a batch."""
    root, one = tmp_path / "models", row(name)
    root.mkdir()
    async with (
        gate(tmp_path / "gate") as opened,
        serve(root, allow_python_models=True) as server,
        loaded(one, root, server, opened, way, max_queue_delay_microseconds=1) as station,
        another_client(station) as bad,
    ):
        asked = await station.busy()
        for count, value in enumerate((BAD, BAD, BAD, 1, BAD, 2, 3, 4), 1):
            asked.append(station.ask(value, client=bad if value == BAD else None))
            await station.pending(count)
        opened.free(99)
        answers = await asyncio.gather(*asked, return_exceptions=True)

    assert [2.0, "failed", 4.0, 6.0, 8.0] == shown(answers[-5:])
    assert [[BAD, BAD, BAD, 1]] == [one for one in opened.executed if {BAD} < set(one)]


async def test_where_all_fail_nobody_is_kept_apart(serve: Serve, tmp_path: Path) -> None:
    """Then the model is at fault: once it recovers, requests are batched again."""
    root = tmp_path / "models"
    root.mkdir()
    async with (
        gate(tmp_path / "gate") as opened,
        serve(root, allow_python_models=True) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        station = Station(server, client, opened, row("jax"))
        await station.load(root, 4, max_queue_delay_microseconds=1)
        first = await gathered(station, BAD, BAD, BAD)
        await station.idle()
        second = await gathered(station, 1, 2, 3)

    assert ["failed"] * 3 == shown(first)
    assert [2.0, 4.0, 6.0] == second
    assert [[1, 2, 3]] == opened.executed[1:]


async def test_an_answer_that_has_not_the_form_that_is_asked_for_fails_alone(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even an internal error while building one answer affects only that request."""

    def fails(self: OutputForms, call: Any, outputs: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(OutputForms, "__call__", fails)
    root = tmp_path / "models"
    root.mkdir()
    async with (
        gate(tmp_path / "gate") as opened,
        serve(root, allow_python_models=True) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        station = Station(server, client, opened, row("jax"))
        await station.load(root, 4, max_queue_delay_microseconds=1)
        asked = await station.busy()
        classes = [triton.InferRequestedOutput("y", class_count=1)]
        asked += [station.ask(1), station.ask(2, outputs=classes), station.ask(3)]
        await station.pending(3)
        opened.free(99)
        answers = await asyncio.gather(*asked, return_exceptions=True)

    assert [2.0, "failed", 6.0] == shown(answers[-3:])
    assert {1.0, 2.0, 3.0} == set(opened.executed[-1])


async def test_the_clients_that_are_known_have_a_limit() -> None:
    table = apart.Apart(tuple)
    calls = [InferCall() for _ in range(apart.MOST_APART + 1)]
    for number, call in enumerate(calls, 1):
        call.client = number
        table.add(call, number)
    for call in (calls[0], calls[-1]):
        table.mark(call, apart.MOST_APART + 1)

    assert apart.MOST_APART == len(table)
    assert [False, True] == [calls[0].is_apart, calls[-1].is_apart]


async def test_a_client_is_apart_for_a_while() -> None:
    table, call, later = apart.Apart(tuple), InferCall(), InferCall()
    call.client = later.client = 7
    table.add(call, 0)
    table.mark(later, apart.APART_SECONDS * 1_000_000_000)

    assert not later.is_apart
    assert 0 == len(table)


async def test_what_ends_its_process_is_internal_and_what_waits_is_not(
    serve: Serve, tmp_path: Path
) -> None:
    """Clients may retry UNAVAILABLE elsewhere, so a request that kills a process must not get
    it.
    """
    root = tmp_path / "models"
    root.mkdir()
    async with (
        gate(tmp_path / "gate") as opened,
        serve(root, allow_python_models=True, http_endpoint="port:0") as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        station = Station(server, client, opened, row("own, batched in a process"))
        await station.load(root)
        death = asyncio.ensure_future(over_grpc(station, DEATH))
        await station.until(lambda: opened.held == 1)
        # These are sent to the process as well, but it has not begun executing them.
        waiting = [asyncio.ensure_future(how(station, 1)) for how in (over_grpc, over_rest)]
        await station.in_progress(3)
        await station.pending(2)
        opened.free(1)
        found = await asyncio.gather(death, *waiting)

    assert ["INTERNAL", "UNAVAILABLE", "503"] == [status for status, _ in found]
    assert "while it executed this request" in found[0][1]
    assert ["its process was lost before it began this request," in text for _, text in found] == [
        False,
        True,
        True,
    ]


async def over_grpc(station: Station, value: float) -> tuple[str, str]:
    """Return the status and message of a request."""
    try:
        return "OK", str(await station.ask(value))
    except InferenceServerException as error:
        return str(error.status()).removeprefix("StatusCode."), str(error.message())


async def over_rest(station: Station, value: float) -> tuple[str, str]:
    """Return the status and message of a request."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}
    path, body = f"/v2/models/{station.model}/infer", json.dumps({"inputs": [tensor]})
    answer = await ask(str(station.server.http), "POST", path, body=body.encode())
    return str(answer.status), answer.body.decode()
