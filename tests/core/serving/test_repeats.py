"""Byte-identical requests: replayed from the cache, but still counted and checked."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from xlaserve.errors import ModelNotFound, Overloaded, ShuttingDown
from xlaserve.net.ledger import Ledger
from xlaserve.serving.answers import Counting
from xlaserve.serving.call import Admission, Call, Observer
from xlaserve.serving.gates import Gates
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferOutput
from xlaserve.serving.repeats import Repeats
from xlaserve.serving.response_cache import MOST_MESSAGE_BYTES, ResponseCache
from xlaserve.serving.statistics import VersionStatistics
from xlaserve.tensors import DATATYPES

OUTPUTS = (InferOutput("y", DATATYPES["FP32"], np.zeros((2, 1), np.float32)),)


class Version:
    """A model version that answers, and its instance."""

    model, number = "m", "3"

    def __init__(self) -> None:
        self.admission = Admission("m", 1)
        self.statistics = VersionStatistics()


class Residents:
    """A registry with one model, whose instance is replaced on reload."""

    def __init__(self) -> None:
        self.version = Version()
        self.instance: object | None = object()

    def resolve(self, name: str, number: str = "") -> Any:
        if self.instance is None:
            raise ModelNotFound(name)
        return self.version, self.instance


class World:
    """A cache with one answer, and the replay that serves it."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.residents = Residents()
        self.gates = Gates(observers=[Counting()])
        self.cache = ResponseCache(limit, Ledger(1 << 24))
        self.section = self.cache.section()
        self.section.keep(("key",), OUTPUTS)
        self.repeats = Repeats(self.residents, self.gates, self.cache, clock=lambda: 7)

    def learn(self, message: object = b"request", *, request_id: str = "") -> None:
        """Answer a call from the cache, as the general path does."""
        call = self.call()
        call.id = request_id
        call.model, call.rows = "m", 2
        call.instance = cast(Any, self.residents.instance)
        call.kept = self.section.find(("key",))
        self.repeats.learn(call, message, "", b"answer")

    def call(self) -> InferCall:
        call = InferCall()
        self.gates.admit(call)
        return call

    def ask(self, message: object = b"request") -> bytes | None:
        return self.repeats.answer(self.call(), message)


def test_a_message_that_came_before_is_answered_as_then() -> None:
    world = World()
    assert world.ask() is None
    world.learn()
    call = world.call()

    assert b"answer" == world.repeats.answer(call, b"request")
    assert call.has_ended
    call.tell()
    assert (2, "m", "3") == (call.rows, call.model, call.found.number)
    totals = world.residents.version.statistics.totals()
    assert (1, 1, 0) == (totals.success.count, totals.cache_hit.count, totals.fail.count)
    assert world.ask(b"another") is None


def _reloaded(world: World) -> None:
    world.residents.instance = object()


def _unloaded(world: World) -> None:
    world.residents.instance = None


def _watched(world: World) -> None:
    class Watching:
        def began(self, call: Call) -> None: ...

        def ended(self, calls: object, outcome: object) -> None: ...

    world.gates.observe(cast(Observer, Watching()))


@pytest.mark.parametrize(
    "change",
    [
        _reloaded,
        _unloaded,
        _watched,
        pytest.param(lambda world: world.section.close(), id="closed"),
        pytest.param(lambda world: world.cache.clear(), id="cleared"),
    ],
)
def test_what_has_changed_leaves_the_request_to_the_general_path(
    change: Callable[[World], None],
) -> None:
    world = World()
    world.learn()
    change(world)
    call = world.call()

    assert world.repeats.answer(call, b"request") is None
    assert not call.has_ended
    assert not call.is_found


@pytest.mark.parametrize(
    ("message", "request_id"),
    [
        pytest.param(memoryview(b"request"), "", id="a view, which may change"),
        pytest.param(b"r" * (MOST_MESSAGE_BYTES + 1), "", id="a long one"),
        pytest.param(b"request", "7", id="one with an id"),
    ],
)
def test_what_seldom_comes_again_is_not_learned(message: object, request_id: str) -> None:
    world = World()
    before = world.cache.held
    world.learn(message, request_id=request_id)

    assert world.ask(message) is None
    assert before == world.cache.held


def test_the_gates_are_passed_each_time() -> None:
    world = World()
    world.learn()
    world.residents.version.admission.in_progress = 1
    with pytest.raises(Overloaded):
        world.ask()
    world.gates.drain()
    with pytest.raises(ShuttingDown):
        world.ask()


def test_an_answer_that_is_given_again_is_not_evicted_as_one_that_nobody_asks_for() -> None:
    world = World()
    world.section.keep(("other",), OUTPUTS)
    world.learn()
    world.section.find(("other",))
    world.cache.limit = world.cache.held
    world.ask()
    world.section.keep(("third",), OUTPUTS)

    assert b"answer" == world.ask()
    assert world.section.find(("other",)) is None


def test_an_answer_is_kept_for_a_few_messages_at_most() -> None:
    """A client that encodes one request in many ways fills nothing."""
    world = World()
    for number in range(100):
        world.learn(b"%d" % number)
    (entry,) = world.section.entries.values()

    assert 4 == len(entry.messages)
    assert entry.size == world.cache.held


def test_what_was_written_counts_and_evicts_others() -> None:
    world = World()
    world.section.keep(("other",), OUTPUTS)
    world.cache.limit = world.cache.held
    world.learn()

    assert world.section.find(("other",)) is None
    assert b"answer" == world.ask()
    assert world.cache.held <= world.cache.limit
    assert 1 == world.cache.evictions
