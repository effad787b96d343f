"""An error in one of several requests that cross together affects that request alone."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from support.conditions import until
from support.core import World
from support.fronts import Joined, Noting, joined

from xlaserve.errors import InvalidRequest
from xlaserve.python_models.process.slab import LEAST_BYTES
from xlaserve.serving.engine import Engine
from xlaserve.serving.infer_call import AwaitedInfer
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.tensors import DATATYPES
from xlaserve.workers.fronts import engine, front_end, passing
from xlaserve.workers.fronts.records import tensors_of

WIDE = LEAST_BYTES // 4
"""Elements of a row large enough for the slab."""
COUNT, BAD = 4, 1
"""Requests sent in one loop iteration, and the index of the one that fails."""


class Panic(BaseException):
    """An exception such as a Rust library raises on a panic."""


class Formless:
    """An object that no message can encode."""


def raises(*given: Any, **named: Any) -> Any:
    raise Panic("a library has given up")


def raises_behind(*given: Any) -> Any:
    """Raise after viewing the tensors, so that the views are dropped."""
    tensors_of(*given)
    raise Panic("a library has given up")


def formless(*given: Any, **named: Any) -> Any:
    return Formless()


def half_a_letter(*given: Any, **named: Any) -> Any:
    raise InvalidRequest("half of \ud800")


STEPS: Mapping[str, tuple[Any, str, Callable[..., Any]]] = {
    "a request is written": (passing, "bytes_of", raises),
    "a request has no form": (passing, "_extra", formless),
    "a request is read": (engine, "tensors_of", raises_behind),
    "a request is begun": (Engine, "begin_passed", raises),
    "an error has no form": (Engine, "begin_passed", half_a_letter),
    "an answer is written": (engine, "bytes_of", raises),
    "an answer has no form": (engine, "_said_with", formless),
    "an answer is read": (front_end, "tensors_of", raises_behind),
    "an answer is made": (front_end, "respond", raises),
}
"""A function on each request's path, and a replacement that fails for one of them."""


def ask(pair: Joined, width: int) -> AwaitedInfer:
    call = AwaitedInfer()
    data = np.arange(width, dtype=np.float32).reshape(1, width)
    pair.ends[0].engine.begin(
        call, InferRequest("m", inputs=(InferInput("x", DATATYPES["FP32"], data),))
    )
    return call


def shown(answer: Any) -> Any:
    return "failed" if isinstance(answer, BaseException) else answer.outputs[0].data[0, :2].tolist()


@pytest.mark.parametrize("width", [2, WIDE], ids=["short", "long"])
@pytest.mark.parametrize("step", STEPS)
async def test_one_of_a_turn_fails_alone(
    step: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are answered, the bridge stays open, and the failed one reserves nothing."""
    world = World(batch_limit=4)
    world.may_execute.set()
    owner, name, does = STEPS[step]
    called: list[int] = []
    inner = getattr(owner, name)

    def once(*given: Any, **named: Any) -> Any:
        called.append(len(called))
        return (does if called[-1] == BAD else inner)(*given, **named)

    async with joined(Noting(1, world, width)) as pair:
        bridge = pair.front_ends[0]._bridge
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, once)
            calls = [ask(pair, width) for _ in range(COUNT)]
            async with asyncio.timeout(60):
                answers = await asyncio.gather(
                    *(call.answered() for call in calls), return_exceptions=True
                )
        async with asyncio.timeout(60):
            after = await pair.ends[0].infer(width=width)
        kept = pair.front_ends[0]._bridge
        found = [shown(one) for one in answers]
        del answers
        after_first = after.outputs[0].data[0, :2].tolist()
        del after, calls
        (front,) = pair.fronts._connected
        held = pair.ends[0].ledger, pair.side.ledger
        await until(lambda: not any(ledger.held for ledger in held))
        left = dict(pair.front_ends[0]._calls), dict(front._calls)

    assert [1, 2] == after_first
    assert "failed" == found.pop(BAD)
    assert [[1, 2]] * (COUNT - 1) == found
    assert bridge is kept
    assert ({}, {}) == left
