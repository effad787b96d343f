"""Readiness reported by a model's code: one query at a time, with a time limit."""

import asyncio
import threading
from pathlib import Path

import pytest
from support.python_models import OWN, VECTORS, starting, write
from support.server import Serve

from xlaserve.python_models.readiness import CodeReadiness, ask_all
from xlaserve.residence import catalog


def test_who_asks_meanwhile_gets_the_same_answer_and_the_next_one_asks_anew() -> None:
    said, may_answer = iter([True, False]), threading.Event()

    def is_ready() -> bool:
        may_answer.wait()
        return next(said)

    readiness = CodeReadiness("m", is_ready)
    first = readiness.ask()

    assert first is readiness.ask()
    may_answer.set()
    assert first.result()
    assert not readiness.ask().result()


def test_coroutines_are_awaited_and_copies_without_it_are_not_asked() -> None:
    async def is_ready() -> bool:
        await asyncio.sleep(0)
        return True

    class Copy:
        readiness = CodeReadiness("m", is_ready)

    class Silent:
        readiness = None

    assert [True] == [one.result() for one in ask_all([Copy(), Silent(), object()])]


async def test_no_answer_in_time_is_no_and_holds_nothing_up(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has the class of our own API; Triton's is queried in the same way."""
    code = """
import os
import time

class Model(PythonModel):
    def infer(self, inputs):
        return {"y": inputs["x"]}

    def is_ready(self):
        while not os.path.exists(%r):
            time.sleep(0.01)
        return True
"""
    there = tmp_path / "there"
    write(tmp_path / "models", "m", code % str(there), VECTORS, begin=OWN)
    monkeypatch.setattr(catalog, "READY_SECONDS", 0.05)
    async with starting(serve, tmp_path / "models")() as client:
        late = await client.grpc.is_model_ready("m")
        monkeypatch.setattr(catalog, "READY_SECONDS", 60.0)
        there.touch()
        in_time = await client.grpc.is_model_ready("m")

    assert (False, True) == (late, in_time)
