"""An engine and its front ends in one process, connected by socket pairs."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from support.conditions import until
from support.core import FP32, FakeModel, World
from support.server import RunningServer, serving
from xlaserve.concurrency.workers import Workers
from xlaserve.model_config.config import ModelConfig
from xlaserve.net.ledger import Ledger
from xlaserve.residence.capacity import Capacity, Reservation
from xlaserve.residence.lifecycle import Event
from xlaserve.residence.registry import Instance, Registry
from xlaserve.runtime.loaded import Value
from xlaserve.serving.answers import Counting
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.inference import InferInput, InferRequest, InferResponse
from xlaserve.serving.stations.table import ExecutionPolicy, Stations
from xlaserve.workers.fronts.engine import FrontEnds
from xlaserve.workers.fronts.front_end import FrontEnd, Limits

SLABS = 2 << 20
"""Total size in bytes of the two slabs of a front end."""


class Noting(FakeModel):
    """Records the number of rows in each execution."""

    def __init__(self, amount: float, world: World, width: int = 2) -> None:
        super().__init__(amount, world, ["cpu:0"])
        shape = (-1, width)
        tensors = tuple(type(self.info.inputs[0])(name, FP32, shape) for name in ("x", "y"))
        self.info = type(self.info)("fake", tensors[:1], tensors[1:], max_batch_size=4)
        self.rows: list[int] = []

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        tensor = inputs["x"]
        assert isinstance(tensor, np.ndarray)
        self.rows.append(len(tensor))
        return super().execute(inputs, resident=resident, replica=replica)


@dataclass
class Side:
    """The server core of one simulated process."""

    workers: Workers
    registry: Registry = field(default_factory=lambda: Registry(1024))
    ledger: Ledger = field(default_factory=lambda: Ledger(64 << 20))

    def __post_init__(self) -> None:
        self.engine = Engine(self.registry, Gates(observers=[Counting()]), self.workers.host)
        self.stations = Stations(self.workers, ExecutionPolicy(0.5), self.engine)

    async def infer(self, rows: int = 1, *, width: int = 2, id: str = "") -> InferResponse:
        """Send a request to the model `m`; the input counts up from 0."""
        data = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
        return await self.engine.infer(
            InferRequest("m", id=id, inputs=(InferInput("x", FP32, data),))
        )

    def load(self, model: FakeModel, config: ModelConfig | None = None) -> Instance:
        """Install a model as version 1 of `m`."""
        version = self.registry.version("m", "1")
        self.registry.change(version, Event.LOAD)
        version.instance = Instance(
            model,
            object(),
            Reservation(Capacity(), "m"),
            config or ModelConfig(),
            make_station=self.stations.build,
        )
        self.registry.change(version, Event.LOADED)
        return version.instance


@dataclass
class Joined:
    """An engine, and front ends that mirror its models."""

    side: Side
    fronts: FrontEnds
    ends: Sequence[Side]
    front_ends: Sequence[FrontEnd]

    async def shown(self) -> None:
        """Wait until every front end mirrors the engine's models."""
        await self.fronts.mirror.shown()


async def connect(fronts: FrontEnds, front_end: FrontEnd) -> None:
    """Connect a front end to an engine and wait until it mirrors the engine's models."""
    one, other = socket.socketpair()
    before = len(fronts._connected)
    await asyncio.gather(front_end.connect(one), fronts.connect(other))
    await until(lambda: len(fronts._connected) > before)
    await fronts.mirror.shown()


@asynccontextmanager
async def joined(
    model: FakeModel | None = None,
    *,
    count: int = 1,
    config: ModelConfig | None = None,
    limits: Limits | None = None,
) -> AsyncIterator[Joined]:
    """Run an engine with a model, and `count` front ends, for the duration of a block."""
    workers = Workers(load_threads=1, execute_threads=2)
    side = Side(workers)
    if model is not None:
        side.load(model, config)
    fronts = FrontEnds(side.engine, side.registry, side.ledger, lambda: True)
    ends = [Side(workers) for _ in range(count)]
    found = [
        FrontEnd(
            end.registry,
            Capacity(),
            end.ledger,
            end.stations.build,
            limits or Limits(SLABS, requests=100),
        )
        for end in ends
    ]
    try:
        with fronts.mirror.following():
            for front_end in found:
                await connect(fronts, front_end)
            yield Joined(side, fronts, ends, found)
    finally:
        for front_end in found:
            if front_end._bridge is not None:
                front_end._bridge.close()
        for front in list(fronts._connected):
            front.bridge.close()
        await until(lambda: not fronts._connected)
        workers.close(5)


@asynccontextmanager
async def front_of(
    engine: RunningServer, scratch: Path
) -> AsyncIterator[tuple[RunningServer, FrontEnds]]:
    """Run a server as front end of another one for the duration of a block.

    It serves a model once `mirror.shown` of the other server has returned.
    """
    nothing = scratch / "nothing"
    nothing.mkdir()
    of = engine.application
    fronts = FrontEnds(of.engine, of.registry, of.ledger, lambda: True)
    async with serving(scratch, nothing, http_endpoint="port:0") as server:
        own = server.application
        limits = Limits(SLABS, requests=100)
        front = FrontEnd(own.registry, own.capacity, own.ledger, own.stations.build, limits)
        with fronts.mirror.following():
            await connect(fronts, front)
            yield server, fronts
            for connected in list(fronts._connected):
                connected.bridge.close()
            await until(lambda: not fronts._connected and front._bridge is None)
