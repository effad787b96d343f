"""Fake models that load without JAX, and a server core that uses them."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from xlaserve.concurrency.workers import Workers
from xlaserve.errors import InvalidModel
from xlaserve.files.roots import Roots
from xlaserve.model_config.config import ModelConfig
from xlaserve.residence.capacity import Capacity
from xlaserve.residence.control import ModelControl
from xlaserve.residence.registry import Registry
from xlaserve.residence.repository.repository import Repository
from xlaserve.runtime.devices.placement import ONE_CPU, Devices
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import Dispatching, ModelInfo, ModelMemory, OnDemand, Stage, Value
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.stations.table import Stations
from xlaserve.settings import Settings
from xlaserve.tensors import DATATYPES, TensorSpec

FP32 = DATATYPES["FP32"]


class FakeModel:
    """Adds the number in its file to its input."""

    on_demand: OnDemand | None = None
    dispatching: Dispatching | None = None

    def __init__(self, amount: float, world: "World", devices: Sequence[str]) -> None:
        self.info = ModelInfo(
            "fake",
            (TensorSpec("x", FP32, (-1, 2)),),
            (TensorSpec("y", FP32, (-1, 2)),),
            max_batch_size=4,
            memory=ModelMemory(
                parameters_bytes=world.measured_bytes * len(devices),
                per_device=dict.fromkeys(devices, world.measured_bytes),
            ),
        )
        self.amount = amount
        self.replicas = world.replicas
        self.batch_limit = world.batch_limit
        self.closed = self.stopped = False
        self._world = world

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        assert not self.closed, "executed after close"
        self._world.may_execute.wait(10)
        assert not self.closed, "closed while executing"
        tensor = inputs["x"]
        assert isinstance(tensor, np.ndarray)
        return {"y": tensor + np.float32(self.amount)}

    def expected_seconds(self, rows: int) -> float:
        return self._world.seconds

    def padded_rows(self, rows: int) -> int:
        return rows

    @property
    def next_bucket_bytes(self) -> Mapping[str, int]:
        """Return the memory for the next bucket: none, unless the test sets it."""
        return self._world.next_bucket_bytes

    def compile_rest(
        self,
        check_cancelled: Callable[[], None] = lambda: None,
        on_stage: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        """Return immediately: a fake model has nothing to compile."""

    def stop(self) -> None:
        self.stopped = True

    def close(self) -> None:
        self.closed = True
        self._world.open.remove(self)


def devices_of(config: ModelConfig) -> list[str]:
    """Return the devices on which a configuration places replicas."""
    return [f"cpu:{index}" for index in config.parameters.get("devices", "0").split(",")]


@dataclass
class World:
    """State that fake models share with the test: sizes, loads, and events that hold them back."""

    seconds: float = 1.0
    batch_limit: int = 0
    replicas: int = 1
    predicted_bytes: int = 100
    """Bytes per device, like the sizes below."""
    measured_bytes: int = 100
    next_bucket_bytes: Mapping[str, int] = field(default_factory=dict)
    devices: Devices = ONE_CPU
    model_type: "Callable[[float, World, Sequence[str]], FakeModel]" = FakeModel
    open: list[FakeModel] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    tried: list[Path] = field(default_factory=list)
    may_load: threading.Event = field(default_factory=threading.Event)
    may_execute: threading.Event = field(default_factory=threading.Event)
    loading: threading.Event = field(default_factory=threading.Event)

    def predict_size(
        self,
        directory: Path,
        config: ModelConfig,
        devices: Devices,
        roots: Roots,
        *,
        in_background: bool = False,
    ) -> dict[str, int]:
        return dict.fromkeys(devices_of(config), self.predicted_bytes)

    def try_loading(
        self, directory: Path, config: ModelConfig, check_cancelled: Callable[[], None]
    ) -> None:
        self.tried.append(directory)
        if "deadly" in (directory / "amount.json").read_text():
            raise InvalidModel("amount.json crashed the process that loaded it on trial")

    def load(self, directory: Path, context: LoadContext) -> FakeModel:
        self.loads.append(f"{context.model}/{context.version}")
        context.on_stage(Stage("compiling", 1, 2))
        self.loading.set()
        self.may_load.wait(10)
        context.check_cancelled()
        text = (directory / "amount.json").read_text()
        try:
            model = self.model_type(json.loads(text), self, devices_of(context.config))
        except ValueError as error:
            raise InvalidModel(f"amount.json is not a number: {text}") from error
        self.open.append(model)
        return model


@dataclass(frozen=True)
class Core:
    """The server core over a repository in a temporary folder."""

    root: Path
    settings: Settings
    registry: Registry
    repository: Repository
    control: ModelControl
    gates: Gates
    engine: Engine
    workers: Workers
    capacity: Capacity

    def renew(self, stations: Stations | None = None) -> None:
        """Rebuild the station of every model after the test has changed the world."""
        for model in self.registry.models():
            for version in model.versions.values():
                instance = version.instance
                if instance is not None:
                    if stations is not None:
                        instance._make_station = stations.build
                    instance.station = instance._make_station(instance, None)


MakeCore = Callable[..., Core]
"""Builds a core; settings are keywords."""

AddModel = Callable[..., Path]
"""Writes a model: name, the number to add for each version, and optionally its configuration."""
