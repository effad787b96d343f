"""Grammars that compute for minutes, over each protocol, next to another caller's."""

import asyncio
import json
import string
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import isqrt
from random import Random
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton
from support import scripted_language
from support.conditions import MOST_SECONDS, until
from support.crowds import beside_a_crowd
from support.gated import Panic
from support.hard_grammars import BOUNDED, HARD
from support.http import Answer, ask
from support.server import RunningServer, serving
from tritonclient.utils import InferenceServerException

from xlaserve.language import grammars
from xlaserve.language.grammars import GROWTH
from xlaserve.serving.access.tokens import digest_of, new_token

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE, GOOD = new_token(), new_token()
GOOD_REGEX = "ab{2}c"
TOKENS = [ord("0")]
MIB = 1 << 20
MOST = {"max_tokens": 8, "temperature": 0}
LETTERS = string.ascii_lowercase
GROWING = "|".join(
    f"[a-z]*{first}{second}[a-z]{{2}}{first}" for first, second in product(LETTERS, LETTERS)
)
GROWN = "".join(Random(1).choices(LETTERS, k=120))
"""A text for which the grammar takes between 2,000 and 15,000 states."""


@dataclass(frozen=True)
class Place:
    server: RunningServer

    async def post(self, path: str, body: Any, token: str = HOSTILE) -> Answer:
        assert self.server.http is not None
        headers = ("Authorization", f"Bearer {token}")
        return await ask(self.server.http, "POST", path, headers, body=json.dumps(body).encode())

    async def good(self, regex: str = GOOD_REGEX) -> Answer:
        """Send another caller's request with its own grammar."""
        return await self.post("/v2/models/story/generate", generated({"regex": regex}), GOOD)


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="place")
async def _place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("grammars")
    scripted_language.export(
        folder / "models" / "story", ["abbc", GROWN], scripted_language.HERMES, grammars="true"
    )
    may = {"allow": ["infer", "metadata"]}
    callers = {"hostile": HOSTILE, "good": GOOD}
    rules = [{"name": n, "token": digest_of(token), **may} for n, token in callers.items()]
    (folder / "rules.json").write_text(json.dumps({"caller": rules}))
    running = serving(
        folder,
        folder / "models",
        load_model=("story",),
        http_endpoint="port:0",
        access_rules=str(folder / "rules.json"),
    )
    async with running as server:
        yield Place(server)


def generated(grammar: Mapping[str, str]) -> dict[str, Any]:
    return {"tokens": TOKENS, "parameters": {**grammar, **MOST}}


def inferred(grammar: Mapping[str, str]) -> dict[str, Any]:
    tensor = {"name": "tokens", "shape": [1], "datatype": "INT32", "data": TOKENS}
    return {"inputs": [tensor], "parameters": {**grammar, **MOST}}


async def over_rest(place: Place, path: str, body: Any) -> tuple[str, str]:
    """Return the class of an answer's status, and the message."""
    found = await place.post(path, body)
    return str(found.status), found.body.decode()


async def over_grpc(place: Place, grammar: Mapping[str, str], *, stream: bool) -> tuple[str, str]:
    tensor = triton.InferInput("tokens", [1], "INT32")
    tensor.set_data_from_numpy(np.array(TOKENS, np.int32))
    headers = {"authorization": f"Bearer {HOSTILE}"}
    asked = {"model_name": "story", "inputs": [tensor], "parameters": {**grammar, **MOST}}

    async def sent() -> AsyncIterator[dict[str, Any]]:
        yield asked

    async with triton.InferenceServerClient(place.server.url) as client:
        try:
            if not stream:
                await client.infer(**asked, headers=headers)
            else:
                answers: Any = client.stream_infer(sent(), headers=headers)
                async for _, error in answers:
                    if error is not None:
                        raise error
        except InferenceServerException as error:
            return error.status() or "of a stream", error.message()
    return "OK", ""


Door = Callable[[Place, dict[str, str]], Awaitable[tuple[str, str]]]


def rest(path: str, body: Callable[[dict[str, str]], Any]) -> Door:
    return lambda place, grammar: over_rest(place, path, body(grammar))


def chat(grammar: Mapping[str, str]) -> dict[str, Any]:
    """Return a chat request whose answer follows a schema, or calls a tool with one."""
    schema = {"name": "a", "schema": json.loads(grammar["json_schema"])}
    return {
        "model": "story",
        "messages": [{"role": "user", "content": "0"}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        **MOST,
    }


def called(grammar: Mapping[str, str]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"a": json.loads(grammar["json_schema"])},
        "required": ["a"],
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    messages = [{"role": "user", "content": "0"}]
    more = {"tools": [tool], "tool_choice": "required"}
    return {"model": "story", "messages": messages, **more, **MOST}


DOORS: Mapping[str, Door] = {
    "generate": rest("/v2/models/story/generate", generated),
    "infer": rest("/v2/models/story/infer", inferred),
    "ModelInfer": lambda place, grammar: over_grpc(place, grammar, stream=False),
    "ModelStreamInfer": lambda place, grammar: over_grpc(place, grammar, stream=True),
    "chat": rest("/v1/chat/completions", chat),
    "tools": rest("/v1/chat/completions", called),
}
OF_SCHEMAS = ("chat", "tools")
REFUSED = ("400", "StatusCode.INVALID_ARGUMENT", "of a stream")
"""Statuses of a rejection; this client gets none within a stream."""


IN_TIME = "within 0.05 CPU seconds"
REFUSED_EARLIER: Mapping[tuple[str, str], str] = {
    ("chat", "multiple, exponent"): "can be compiled and followed",
    ("tools", "multiple, exponent"): "can be compiled and followed",
    ("tools", "multiples by reference"): "can be compiled and followed",
    ("tools", "many multiples"): "tokens (the model's positions)",
    ("tools", "a multiple for each property"): "tokens (the model's positions)",
}
"""Cases with an error other than `IN_TIME`: JSON writes more digits than the library accepts, a
reference is dangling, or the prompt with all its tools is too long.
"""


def cases() -> Iterator[Any]:
    """Yield all pairs of kinds and protocols; the quick ones cover each kind and each protocol."""
    for row, door in enumerate(DOORS):
        kinds = [one for one in HARD if door not in OF_SCHEMAS or one != "multiple in Lark"]
        for column, kind in enumerate(kinds):
            marks = [] if column % len(DOORS) == row else [pytest.mark.slow]
            yield pytest.param(door, kind, marks=marks)


@pytest.mark.parametrize(("door", "kind"), [*cases()])
async def test_each_hard_grammar_is_refused_at_each_door_and_others_are_answered(
    place: Place, door: str, kind: str
) -> None:
    parameter, text = HARD[kind](list(DOORS).index(door))

    status, told = await DOORS[door](place, {parameter: text})
    good = await place.good()

    assert status in REFUSED
    told_earlier = REFUSED_EARLIER.get((door, kind))
    assert (told_earlier or IN_TIME) in told
    assert told_earlier or "model 'story'" in told
    assert good.status == 200
    assert json.loads(good.body)["tokens"] == [ord(one) for one in "abbc"]


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ('{"type":"integer","multipleOf":9999991}', "9999991"),
        ('{"multipleOf":9999991.5,"minimum":0}', "9999991.5"),
        ('{"items":{"anyOf":[{"type":["null","number"],"multiple\\u004ff":-9999999}]}}', "9999999"),
        ('{"properties":{"enum":{"multipleOf":9999991}}}', "9999991"),
        ('{"type":5,"properties":{"type":{"multipleOf":1000000.5}}}', "1000000.5"),
    ],
)
async def test_what_can_be_read_off_is_refused_before_it_is_compiled(
    place: Place, schema: str, told: str
) -> None:
    status, text = await over_rest(
        place, "/v2/models/story/generate", generated({"json_schema": schema})
    )

    assert status == "400"
    assert f"got a multipleOf with more than 100000 remainders, {told}" in text


@pytest.mark.parametrize(
    "schema",
    [
        '{"type":"integer","multipleOf":1000000}',
        '{"type":"integer","multipleOf":9999991,"minimum":0,"exclusiveMaximum":99}',
        '{"type":"string","multipleOf":9999991}',
        '{"enum":[0],"multipleOf":9999991}',
        '{"enum":[{"multipleOf":9999991}]}',
        '{"type":"integer","multipleOf":0.00001}',
        '{"type":"integer","maximum":9,"$defs":{"a":{"multipleOf":9999991}}}',
        '{"allOf":[{"type":"integer","multipleOf":9999991},{"minimum":0,"maximum":9}]}',
        '{"minimum":0,"maximum":9,"anyOf":[{"type":"integer","multipleOf":9999991}]}',
        '{"type":"integer","maximum":9,"x-limits":{"multipleOf":9999991}}',
    ],
)
async def test_large_multiples_with_few_remainders_are_followed(place: Place, schema: str) -> None:
    status, text = await over_rest(
        place, "/v2/models/story/generate", generated({"json_schema": schema})
    )

    assert status == "200", text


HELD = '{"type":"integer","multipleOf":9973}'
HELD_BYTES = 4 * MIB
"""Less than llguidance needs for it."""


@pytest.mark.parametrize("door", DOORS)
async def test_a_grammar_is_charged_to_who_asks(place: Place, door: str) -> None:
    """From before its compilation until the answer ends; without memory it is rejected."""
    ledger = place.server.application.ledger
    await until(lambda: not ledger.held)
    status, told = await DOORS[door](place, {"json_schema": HELD})
    await until(lambda: not ledger.held)
    assert status in ("200", "OK"), told

    other = ledger.open()
    other.hold(ledger.limit - 2 * HELD_BYTES)
    status, told = await DOORS[door](place, {"json_schema": HELD})
    other.close()
    await until(lambda: not ledger.held)

    assert status in ("503", "StatusCode.RESOURCE_EXHAUSTED", "of a stream")
    assert "the grammar" in told
    assert "max_held_bytes" in told


async def test_a_grammar_that_grows_is_charged_before_it_has_more(place: Place) -> None:
    """Then it continues; without memory its answer ends, a small grammar's does not."""
    ledger = place.server.application.ledger
    small, large, _ = GROWTH.values()
    asked = {
        "tokens": [*b"??1"],
        "parameters": {"regex": GROWING, "max_tokens": len(GROWN), "temperature": 0},
    }
    await until(lambda: not ledger.held)
    answer = await place.post("/v2/models/story/generate", asked)
    await until(lambda: not ledger.held)
    assert answer.json["tokens"] == [ord(one) for one in GROWN]

    other = ledger.open()
    # A connection may have the square of what is left, by the limit: more than the first room.
    other.hold(ledger.limit - isqrt(ledger.limit * (small + large) // 2))
    refused = await place.post("/v2/models/story/generate", asked)
    good = await place.good()
    other.close()
    await until(lambda: not ledger.held)

    assert (refused.status, good.status) == (503, 200)
    assert b"the grammar" in refused.body


async def test_a_caller_with_many_hard_grammars_keeps_no_other_waiting(place: Place) -> None:
    count = 12

    async def hostile(number: int) -> str:
        parameter, text = HARD["multiples together"](1000 + number)
        body = generated({parameter: text})
        return (await over_rest(place, "/v2/models/story/generate", body))[0]

    found = await beside_a_crowd(hostile, partial(place.good, "ab{2}c|n"), count)

    assert isinstance(found.good, Answer)
    assert found.good.status == 200
    assert json.loads(found.good.body)["tokens"] == [ord(one) for one in "abbc"]
    assert found.before < count // 2
    assert found.ended == ["400"] * count


@pytest.mark.parametrize("kind", BOUNDED)
async def test_what_the_library_bounds_is_refused_or_followed(place: Place, kind: str) -> None:
    """Either way the client gets an answer, and others are served."""
    parameter, text = BOUNDED[kind]
    status, told = await over_rest(place, "/v2/models/story/generate", generated({parameter: text}))
    good = await place.good()

    assert (status, told[:10]) == ("400", '{"error":"') or status == "200"
    assert good.status == 200


GROWS = {
    "tokens": [*b"??1"],
    "parameters": {"regex": GROWING, "max_tokens": len(GROWN), "temperature": 0},
}
PLAIN = {"tokens": TOKENS, "parameters": MOST}


async def test_a_grammar_grows_beside_the_steps_of_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that takes is not part of the time that its own steps may take."""
    begun, free = threading.Event(), threading.Event()
    grow = grammars.Place.grow

    def slowly(one: grammars.Place) -> None:
        if one._taken:
            begun.set()
            assert free.wait(MOST_SECONDS)
            until_ns = time.thread_time_ns() + 2 * grammars._MOST_STEPS_NS
            while time.thread_time_ns() < until_ns:
                pass
        grow(one)

    monkeypatch.setattr(grammars.Place, "grow", slowly)
    growing = asyncio.ensure_future(place.post("/v2/models/story/generate", GROWS))
    try:
        await until(begun.is_set)
        async with asyncio.timeout(MOST_SECONDS / 2):
            other = await place.post("/v2/models/story/generate", PLAIN, GOOD)
        has_waited = not growing.done()
    finally:
        free.set()
    answer = await growing

    assert (has_waited, other.status) == (True, 200)
    assert answer.json["tokens"] == [ord(one) for one in GROWN]


async def test_an_answer_that_is_given_up_while_its_grammar_grows_leaves_its_slot(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, free = threading.Event(), threading.Event()
    grow = grammars.Place.grow

    def held(one: grammars.Place) -> None:
        if one._taken:
            begun.set()
            assert free.wait(2 * MOST_SECONDS)
        grow(one)

    monkeypatch.setattr(grammars.Place, "grow", held)
    application = place.server.application
    counts = cast(Any, application.registry.resolve("story")[1]).runner.counts
    growing = asyncio.ensure_future(place.post("/v2/models/story/generate", GROWS))
    try:
        await until(begun.is_set)
        running = counts.running
        growing.cancel()
        await until(lambda: not counts.running)
    finally:
        free.set()
    good = await place.good()
    await until(lambda: not application.ledger.held)

    assert (running, good.status) == (1, 200)


async def test_a_growth_that_fails_fails_its_answer_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow = grammars.Place.grow

    def panicking(one: grammars.Place) -> None:
        if one._taken:
            raise Panic("the library has given up")
        grow(one)

    monkeypatch.setattr(grammars.Place, "grow", panicking)
    failed, good = await asyncio.gather(
        place.post("/v2/models/story/generate", GROWS),
        place.post("/v2/models/story/generate", PLAIN, GOOD),
    )
    again = await place.good()

    assert (failed.status, good.status, again.status) == (500, 200, 200)


async def test_an_answer_ends_behind_a_last_token_with_which_its_grammar_grows(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a stop token is allowed then."""
    lacks_room = grammars.Place._lacks_room
    rooms = list[int]()

    def at_the_end(one: grammars.Place) -> bool:
        rooms.append(len(one._rooms))
        is_first = rooms[-1] == len(GROWTH) - 1
        return (is_first and len(one._taken) == len("abbc")) or lacks_room(one)

    monkeypatch.setattr(grammars.Place, "_lacks_room", at_the_end)
    answer = await place.good()

    assert answer.json["tokens"][:-1] == [ord(one) for one in "abbc"]
    assert rooms[-1] == len(GROWTH) - 2
