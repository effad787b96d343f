"""Devices that compute when the test says so, and models that are on them."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from support.core import FakeModel, World
from xlaserve.runtime.loaded import InFlight, Value
from xlaserve.tensors import Tensor

LONG_SECONDS = 10
"""More than any of the tests takes: what waits for so long will never come."""


@dataclass(eq=False)
class Computation:
    """One execution on a device (an InFlight): over once the test ends it."""

    model: "AcceleratedModel"
    queue: str
    inputs: Tensor
    thread: str
    """The one that dispatched it."""
    may_end: threading.Event
    problem: Exception | None = None
    fetched_by: str = ""

    @property
    def rows(self) -> int:
        """Return how many rows it computes."""
        return len(self.inputs)

    def end(self, problem: Exception | None = None) -> None:
        """Let it be over, perhaps with an error that the device finds out about late."""
        self.problem = problem
        self.may_end.set()

    def fetch(self) -> Mapping[str, Value]:
        self.fetched_by = threading.current_thread().name
        assert self.may_end.wait(LONG_SECONDS)
        assert not self.model.closed, "closed while it was in flight"
        if self.problem is not None:
            raise self.problem
        return {"y": self.inputs + np.float32(self.model.amount)}


@dataclass
class Accelerators:
    """What the devices were given, in order, and a gate before them."""

    given: list[Computation] = field(default_factory=list)
    may_dispatch: threading.Event = field(default_factory=threading.Event)
    end_at_once: bool = False
    problem: Exception | None = None
    """What the next dispatches raise."""

    def models_on(self, *queues: str) -> Callable[[float, World, Sequence[str]], FakeModel]:
        """Make models with a replica in each of these lines of work."""
        return partial(AcceleratedModel, self, queues)

    async def has(self, count: int) -> Sequence[Computation]:
        """Wait until the devices were given so many, and return all there are then."""
        await until(lambda: len(self.given) >= count)
        return self.given

    def open(self) -> None:
        """Let everything go on, and all that comes."""
        self.end_at_once = True
        self.may_dispatch.set()
        for computation in self.given:
            computation.may_end.set()


class AcceleratedModel(FakeModel):
    """A fake model whose executions are dispatched."""

    def __init__(
        self,
        accelerators: Accelerators,
        queues: Sequence[str],
        amount: float,
        world: World,
        devices: Sequence[str],
    ) -> None:
        super().__init__(amount, world, devices)
        self.queues = queues
        self.replicas = len(queues)
        self.dispatching = self
        self._accelerators = accelerators

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        raise AssertionError("executed where a thread waits for it")

    def dispatch(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> InFlight:
        """Give a computation to the device of a replica, while the gate is open."""
        assert self._accelerators.may_dispatch.wait(LONG_SECONDS)
        assert not self.closed, "dispatched after close"
        if self._accelerators.problem is not None:
            raise self._accelerators.problem
        tensor = inputs["x"]
        assert isinstance(tensor, np.ndarray)
        thread, may_end = threading.current_thread().name, threading.Event()
        given = Computation(self, self.queues[replica], tensor, thread, may_end)
        if self._accelerators.end_at_once:
            may_end.set()
        self._accelerators.given.append(given)
        return given


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop go on until something is so."""
    async with asyncio.timeout(LONG_SECONDS):
        while not condition():
            await asyncio.sleep(0.0005)
