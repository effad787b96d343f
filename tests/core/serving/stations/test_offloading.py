"""When a batch goes to another worker, and how that affects the lanes of this one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from support.calls import ToldInfer
from support.core import FakeModel, World

from xlaserve.runtime.loaded import LoadedModel
from xlaserve.serving.infer_call import Ended, Executed, InferCall
from xlaserve.serving.stations.batching import Batcher, RequestQueue
from xlaserve.serving.stations.host import HostWork
from xlaserve.serving.stations.offloading import OffloadingRunner
from xlaserve.serving.stations.station import Served

DONE = Executed({}, 0, 0)
SERVED = cast(Served, object())


@dataclass
class Home:
    """A local runner with one lane; the test completes its batches."""

    lanes: int = 1
    is_inline: bool = False
    begun: list[tuple[int, Callable[[], None], Ended]] = field(default_factory=list)
    fails: bool = False

    def run(self, requests: Sequence[InferCall], freed: Callable[[], None], ended: Ended) -> None:
        if self.fails:
            raise RuntimeError("no thread")
        self.begun.append((len(requests), freed, ended))

    def end(self) -> None:
        """Complete the oldest batch."""
        _, freed, ended = self.begun.pop(0)
        freed()
        ended(DONE)


@dataclass
class Others:
    """Another worker, idle or busy."""

    least_seconds: float = 0.5
    most_bytes: int = 100
    are_idle: bool = True
    takes: bool = True
    given: list[tuple[int, Ended, Callable[[], None]]] = field(default_factory=list)

    def serve(self, instance: Served, model: LoadedModel, work: HostWork) -> None:
        """Serve nobody."""

    def execute(
        self,
        instance: Served,
        requests: Sequence[InferCall],
        ended: Ended,
        refused: Callable[[], None],
    ) -> bool:
        if self.takes:
            self.given.append((len(requests), ended, refused))
        return self.takes


@dataclass
class Station:
    """An offloading runner, its local runner, and what it reported about batches."""

    seconds: float = 1.0
    home: Home = field(default_factory=Home)
    others: Others = field(default_factory=Others)
    free: int = 1
    """Free lanes, as a batcher would count them."""
    ended: list[Any] = field(default_factory=list)
    resumed: int = 0
    queue: list[InferCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = FakeModel(1, World(seconds=self.seconds, batch_limit=4), ["cpu:0"])
        self.runner = OffloadingRunner(self.home, SERVED, model, self.others)
        self.runner.gathered(cast(Batcher, self))
        self.overtakes = self.runner.overtakes(cast(RequestQueue, self.queue))

    def resume(self) -> None:
        self.resumed += 1

    def run(self, count: int) -> None:
        """Start a batch of `count` requests, as a batcher does."""
        self.free -= 1
        self.runner.run(calls(count), self.freed, self.ended.append)

    def freed(self) -> None:
        self.free += 1


def calls(count: int) -> list[InferCall]:
    """Return `count` requests of one row of eight bytes."""
    made = [ToldInfer(lambda _: None) for _ in range(count)]
    for call in made:
        call.inputs = {"x": np.zeros((1, 2), np.float32)}
    return list(made)


def test_the_first_batch_is_executed_at_home() -> None:
    """Offloading does not pay when the local lane is free, even if another worker is idle."""
    station = Station()
    station.queue[:] = calls(4)
    offered = station.overtakes()
    station.run(4)

    assert (False, 0) == (offered, len(station.others.given))
    assert [4] == [count for count, *_ in station.home.begun]


@pytest.mark.parametrize(("pending", "offered"), [(0, False), (1, False), (2, True), (3, True)])
def test_as_many_wait_as_are_executed(pending: int, offered: bool) -> None:
    """A shorter queue is served better by the next local batch."""
    station = Station()
    station.run(2)
    station.queue[:] = calls(pending)

    assert offered == station.overtakes()


@pytest.mark.parametrize(
    "others", [Others(are_idle=False), Others(least_seconds=1.1), Others(most_bytes=15)]
)
def test_what_is_not_worthwhile_stays(others: Others) -> None:
    """No worker is idle, the model is too fast, or the inputs are too large."""
    station = Station(others=others)
    station.run(1)
    station.queue[:] = calls(2)

    assert not station.overtakes()


def test_large_inputs_have_to_take_longer() -> None:
    """Copying them costs time, which an idle worker must make up for."""
    station = Station(others=Others(most_bytes=1 << 30))
    station.run(1)
    offered = []
    for size in (10_000_000, 15_000_000):
        station.queue[:] = calls(1)
        station.queue[0].inputs = {"x": np.broadcast_to(np.float32(0), (1, size))}
        offered.append(station.overtakes())

    assert [True, False] == offered


def test_a_batch_elsewhere_takes_no_lane() -> None:
    """The queue is checked again once it completes."""
    station = Station()
    station.run(1)
    station.run(2)
    free = station.free
    (count, ended, _), *_ = station.others.given
    ended(DONE)

    assert (0, 2, [DONE], 1) == (free, count, station.ended, station.resumed)
    station.home.end()
    assert 1 == station.free


def test_a_batch_that_was_refused_is_executed_at_home() -> None:
    """It runs beyond the lane limit; the queue must then match both batches to be offloaded."""
    station = Station()
    station.run(1)
    station.run(2)
    station.others.given[0][2]()
    station.queue[:] = calls(2)
    offered = station.overtakes()
    station.queue += calls(1)

    assert [1, 2] == [count for count, *_ in station.home.begun]
    assert (False, True) == (offered, station.overtakes())
    station.home.end()
    station.home.end()
    assert (1, [DONE, DONE]) == (station.free, station.ended)


def test_a_worker_that_is_not_idle_any_more_is_not_waited_for() -> None:
    """The batch is queued locally, after the one being executed."""
    station = Station()
    station.run(1)
    station.others.takes = False
    station.run(2)

    assert ([1, 2], -1) == ([count for count, *_ in station.home.begun], station.free)
    station.home.end()
    station.home.end()
    assert (1, [DONE, DONE]) == (station.free, station.ended)


def test_a_batch_that_cannot_begin_leaves_its_lane() -> None:
    """A batch that was refused and cannot start locally either fails."""
    station = Station()
    station.home.fails = True
    with pytest.raises(RuntimeError, match="no thread"):
        station.run(1)
    station.home.fails = False
    station.run(1)
    station.run(1)
    station.home.fails = True
    station.others.given[0][2]()

    assert ["no thread"] == [str(error) for error in station.ended]
    assert 1 == len(station.home.begun)
