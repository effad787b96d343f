"""Two workers in one process that execute batches for each other over a socket pair."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from support.conditions import until
from support.core import FP32, World
from support.fronts import Noting
from xlaserve.concurrency.workers import Workers
from xlaserve.model_config.config import ModelConfig
from xlaserve.net.ledger import Ledger
from xlaserve.residence.capacity import Capacity, Reservation
from xlaserve.residence.lifecycle import Event
from xlaserve.residence.registry import Instance, Registry
from xlaserve.serving.answers import Counting
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.infer_call import AwaitedInfer
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.serving.stations.table import ExecutionPolicy, Stations
from xlaserve.serving.statistics import Totals
from xlaserve.settings import Settings
from xlaserve.workers.handing import HandedConnections, handing_pair
from xlaserve.workers.offload.board import WorkerBoard
from xlaserve.workers.offload.offloading import Offloading

SETTINGS = Settings(repository=Path("models"), offload_shared_bytes=16 << 20)
MARK = ("models/m/1", (("model", 7, 100, 1000),))
"""File metadata that identifies the model to workers."""


@dataclass
class Worker:
    """The core of one worker, with its model `m`."""

    number: int
    board: WorkerBoard
    settings: Settings
    model: Noting
    world: World
    mark: object = MARK
    workers: Workers = field(default_factory=lambda: Workers(load_threads=1, execute_threads=1))
    registry: Registry = field(default_factory=lambda: Registry(1024))
    ledger: Ledger = field(default_factory=lambda: Ledger(64 << 20))

    def __post_init__(self) -> None:
        self.helping = Offloading(
            self.number, self.board, self.settings, self.ledger, threads=self.workers.host
        )
        self.engine = Engine(self.registry, Gates(observers=[Counting()]), self.workers.host)
        self.stations = Stations(self.workers, ExecutionPolicy(0.1), self.engine)
        self.stations.helpers = self.helping
        version = self.registry.version("m", "1")
        self.registry.change(version, Event.LOAD)
        self.instance = version.instance = Instance(
            self.model,
            self.mark,
            Reservation(Capacity(), "m"),
            ModelConfig(),
            make_station=self.stations.build,
        )
        self.registry.change(version, Event.LOADED)

    @property
    def totals(self) -> Totals:
        """Return the statistics of this worker's model."""
        return self.registry.version("m", "1").statistics.totals()

    def begin(self, value: float, rows: int = 1) -> AwaitedInfer:
        """Begin a request and return its call."""
        call = AwaitedInfer()
        width = self.model.info.inputs[0].shape[1]
        data = np.full((rows, width), value, np.float32)
        self.engine.begin(call, InferRequest("m", inputs=(InferInput("x", FP32, data),)))
        return call


@dataclass
class Pair:
    """Two workers: `home` receives all requests, and `helper` is idle."""

    home: Worker
    helper: Worker

    async def begin(self, count: int, rows: int = 1) -> Sequence[AwaitedInfer]:
        """Begin a request at home, wait until it executes, then begin `count` more."""
        first = self.home.begin(0, rows)
        await until(lambda: self.home.model.rows)
        return [first, *(self.home.begin(value, rows) for value in range(1, 1 + count))]

    def release(self) -> None:
        """Let both models execute without waiting."""
        self.home.world.may_execute.set()
        self.helper.world.may_execute.set()

    @staticmethod
    async def answers(calls: Sequence[AwaitedInfer]) -> list[float]:
        """Return the first number of each answer."""
        return [float((await call.answered()).outputs[0].data[0, 0]) for call in calls]


@asynccontextmanager
async def paired(
    width: int = 2, *, helper_mark: object = MARK, settings: Settings = SETTINGS
) -> AsyncIterator[Pair]:
    """Connect two workers whose executions block until they are released."""
    board = WorkerBoard.create(2)
    worlds = [World(batch_limit=4) for _ in range(2)]
    models = [Noting(1, world, width) for world in worlds]
    made = [
        Worker(number, board, settings, models[number], worlds[number], mark)
        for number, mark in enumerate((MARK, helper_mark))
    ]
    pair = Pair(*made)
    sources = [handing_pair() for _ in made]
    running = [
        asyncio.ensure_future(worker.helping.run(HandedConnections(theirs)))
        for worker, (_, theirs) in zip(made, sources, strict=True)
    ]
    try:
        one, other = socket.socketpair()
        with one, other:
            socket.send_fds(sources[0][0], [b"b"], [one.fileno()])
            socket.send_fds(sources[1][0], [b"b"], [other.fileno()])
        await until(lambda: all(worker.helping.are_idle for worker in made))
        yield pair
    finally:
        pair.release()
        for task in running:
            task.cancel()
        for worker in made:
            for peer in list(worker.helping._peers.values()):
                peer.bridge.close()
        await asyncio.wait(running)
        for ours, theirs in sources:
            ours.close()
            theirs.close()
        for worker in made:
            worker.workers.close(5)
