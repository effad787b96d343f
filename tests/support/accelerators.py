"""Fake devices whose computations a test ends by hand, and models on them."""

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
"""Timeout in seconds, longer than any step of these tests."""


@dataclass(eq=False)
class Computation:
    """One execution on a device (an InFlight); it completes when the test calls `end`."""

    model: "AcceleratedModel"
    queue: str
    inputs: Tensor
    thread: str
    """Name of the thread that dispatched it."""
    may_end: threading.Event
    problem: Exception | None = None
    fetched_by: str = ""

    @property
    def rows(self) -> int:
        """Return the number of rows in the batch."""
        return len(self.inputs)

    def end(self, problem: Exception | None = None) -> None:
        """Complete the computation, optionally with an error that the device reports late."""
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
    """The computations given to the devices, in order, and an event that gates dispatch."""

    given: list[Computation] = field(default_factory=list)
    may_dispatch: threading.Event = field(default_factory=threading.Event)
    end_at_once: bool = False
    problem: Exception | None = None
    """Raised by the next dispatches."""

    def models_on(self, *queues: str) -> Callable[[float, World, Sequence[str]], FakeModel]:
        """Make models with one replica in each of these device queues."""
        return partial(AcceleratedModel, self, queues)

    async def has(self, count: int) -> Sequence[Computation]:
        """Wait until the devices have received `count` computations; return them all."""
        await until(lambda: len(self.given) >= count)
        return self.given

    def open(self) -> None:
        """Release all current and future computations."""
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
        """Wait for the gate, then give a computation to the device of a replica."""
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
    """Run the event loop until a condition holds; raises TimeoutError after LONG_SECONDS."""
    async with asyncio.timeout(LONG_SECONDS):
        while not condition():
            await asyncio.sleep(0.0005)
