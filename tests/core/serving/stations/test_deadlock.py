"""Deadlock detection: nested calls that wait for a lane their own caller occupies."""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from xlaserve.errors.code import Deadlock
from xlaserve.serving.infer_call import AwaitedInfer, InferCall
from xlaserve.serving.stations import deadlock
from xlaserve.serving.stations.deadlock import Waits
from xlaserve.serving.stations.ordered import Ordered


@pytest.fixture(autouse=True)
def _nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay the deadlock timers past the end of the test."""
    monkeypatch.setattr(deadlock, "FIRST_SECONDS", 3600.0)


@dataclass
class Copies:
    """A station with this many lanes (an Executing)."""

    lanes: int = 1
    executing: dict[InferCall, bool] = field(default_factory=dict)

    @property
    def computing(self) -> list[InferCall]:
        """Return the calls that are being executed."""
        return [call for call, has_begun in self.executing.items() if has_begun]

    def begun(self) -> AwaitedInfer:
        """Start executing a new call."""
        call = AwaitedInfer()
        self.executing[call] = True
        return call


class World:
    """Two stations, and calls that wait for their lanes."""

    def __init__(self, lanes: int = 1) -> None:
        self.a, self.b = Copies(lanes), Copies(lanes)
        self.waits = Waits()

    def nested(self, parent: InferCall, within: Copies | None) -> AwaitedInfer:
        """Make a call nested in `parent` that waits at station `within`; None for an ensemble."""
        call = AwaitedInfer()
        call.parent = parent
        parent.nested = {*(parent.nested or ()), call}
        if within is not None:
            within.executing[call] = False
            self.waits.watch(call, within)
        return call

    def is_stuck(self, place: Copies) -> bool:
        """Tell whether a call that waits at this station will never be executed."""
        call = AwaitedInfer()
        call.parent = AwaitedInfer()
        self.waits._places[call] = place
        place.executing[call] = False
        return self.waits.is_stuck(call)


async def test_a_copy_that_waits_for_itself_is_stuck() -> None:
    world = World()
    world.nested(world.a.begun(), world.a)

    assert world.is_stuck(world.a)


async def test_two_that_wait_for_each_other_are_stuck() -> None:
    world = World()
    world.nested(world.a.begun(), world.b)
    world.nested(world.b.begun(), world.a)

    assert world.is_stuck(world.a)
    assert world.is_stuck(world.b)


async def test_one_that_waits_for_a_part_of_what_it_calls_is_stuck() -> None:
    """An ensemble occupies no lane itself, but its step waits for the lane of the caller."""
    world = World()
    ensemble = world.nested(world.a.begun(), None)
    world.nested(ensemble, world.a)

    assert world.is_stuck(world.a)


async def test_a_free_copy_or_one_that_computes_ends_the_wait() -> None:
    free, computing, other = World(lanes=2), World(lanes=2), World()
    free.nested(free.a.begun(), free.a)
    computing.nested(computing.a.begun(), computing.a)
    computing.a.begun()
    other.nested(other.a.begun(), other.b)
    other.b.begun()

    assert [False] * 3 == [one.is_stuck(one.a) for one in (free, computing, other)]


async def test_so_does_another_call_that_is_executed() -> None:
    """The caller waits for one of two calls, and may continue once it has the other."""
    world = World()
    asking = world.a.begun()
    world.nested(asking, world.a)
    begun = world.nested(asking, world.b)
    world.b.executing[begun] = True

    assert not world.is_stuck(world.a)


async def test_a_call_that_is_stuck_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlock, "FIRST_SECONDS", 0.0)
    world = World()
    asking = world.a.begun()
    asking.model = "outer"
    stuck = world.nested(asking, world.a)
    stuck.model = "inner"

    with pytest.raises(Deadlock, match="outer -> inner"):
        await stuck.answered()


@dataclass
class Queued:
    """A station with one lane, which executes the first call and queues the others (a Station)."""

    copies: Copies

    def begin(self, call: InferCall) -> None:
        self.copies.executing[call] = not self.copies.executing
        call.wait_at(self)

    def leave(self, call: InferCall) -> None:
        self.copies.executing.pop(call, None)

    def pending_since(self) -> Iterator[int]:
        return iter(())

    def retire(self) -> Sequence[InferCall]:
        return ()


class Counting(Waits):
    """Counts how often it is asked for the station that a call waits at."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def _before(self, call: InferCall) -> Iterator[InferCall]:
        self.asked += 1
        return super()._before(call)


def behind_one_another(
    count: int, *, are_own: bool = True
) -> tuple[Copies, Counting, list[InferCall]]:
    """Return calls in order: the first is executed, the others are nested in it or independent."""
    copies, waits = Copies(), Counting()
    observer: Any = SimpleNamespace(began=None, ended=lambda *_: None)
    ordered = Ordered(Queued(copies), observer, waits)
    station = SimpleNamespace(within=Queued(copies), copies=copies)
    ordered_calls: list[InferCall] = []
    for _ in range(count):
        call: Any = AwaitedInfer()
        call.instance, call.found = SimpleNamespace(station=station), None
        if ordered_calls:
            (first,) = copies.computing
            call.parent = parent = first if are_own else AwaitedInfer()
            parent.nested = {*(parent.nested or ()), call}
        ordered.begin(call)
        ordered_calls.append(call)
    return copies, waits, ordered_calls


@pytest.mark.parametrize("is_stuck", [True, False])
async def test_a_look_asks_each_call_once_what_it_waits_for(is_stuck: bool) -> None:
    _, waits, calls = behind_one_another(100, are_own=is_stuck)

    assert waits.is_stuck(calls[-1]) is is_stuck
    assert waits.asked <= 2 * len(calls)


async def test_looks_at_calls_behind_one_another_share_what_they_find() -> None:
    _, waits, calls = behind_one_another(50, are_own=False)
    for call in calls[1:]:
        waits._check(call, 1.0)

    assert waits.asked <= 2 * len(calls)


async def test_a_look_gives_up_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    _, waits, calls = behind_one_another(20)
    monkeypatch.setattr(deadlock, "MOST_WAITS", 10)

    assert not waits.is_stuck(calls[-1])
    assert waits.asked <= 10


async def test_of_calls_in_order_a_call_waits_for_the_one_right_before() -> None:
    _, _, calls = behind_one_another(4)
    place: Any = calls[0].place

    assert [1, 2, 2, 2] == [len(list(place.awaited(call))) for call in calls]
    assert calls[2] in place.awaited(calls[3])
    calls[2].cancel()
    assert calls[1] in place.awaited(calls[3])


async def test_an_ended_call_is_not_kept_until_the_next_look() -> None:
    waits, copies = Waits(), Copies()
    call = InferCall()
    call.parent = InferCall()
    waits.watch(call, copies)
    kept = weakref.ref(call)
    call.cancel()
    del call

    assert kept() is None
