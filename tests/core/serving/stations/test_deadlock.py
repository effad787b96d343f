"""Which calls of calls wait for ever: each for a copy that waits for them."""

from dataclasses import dataclass, field

import pytest

from xlaserve.errors.code import Deadlock
from xlaserve.serving.infer_call import AwaitedInfer, InferCall
from xlaserve.serving.stations import deadlock
from xlaserve.serving.stations.deadlock import Waits


@pytest.fixture(autouse=True)
def _nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the timers be due when the test has long ended."""
    monkeypatch.setattr(deadlock, "FIRST_SECONDS", 3600.0)


@dataclass
class Copies:
    """A station with so many copies (an Executing)."""

    lanes: int = 1
    executing: dict[InferCall, bool] = field(default_factory=dict)

    @property
    def computing(self) -> list[InferCall]:
        """Return the calls that a copy has begun with."""
        return [call for call, has_begun in self.executing.items() if has_begun]

    def begun(self) -> AwaitedInfer:
        """Have a copy begin with a call."""
        call = AwaitedInfer()
        self.executing[call] = True
        return call


class World:
    """Two stations, and calls that wait for their copies."""

    def __init__(self, lanes: int = 1) -> None:
        self.a, self.b = Copies(lanes), Copies(lanes)
        self.waits = Waits()

    def nested(self, parent: InferCall, within: Copies | None) -> AwaitedInfer:
        """Make a call within another, which waits for a copy; None for where it is executed."""
        call = AwaitedInfer()
        call.parent = parent
        parent.nested = {*(parent.nested or ()), call}
        if within is not None:
            within.executing[call] = False
            self.waits.watch(call, within)
        return call

    def is_stuck(self, place: Copies) -> bool:
        """Tell whether a call that waits for a copy will never have one."""
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
    """As of an ensemble, which is executed nowhere, and whose step is for the copy that asks."""
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
    """It waits for one of two, and the code may go on when it has the other."""
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
