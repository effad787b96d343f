"""A repository of models that load without JAX, and a core that serves it."""

import gc
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.core import AddModel, Core, MakeCore, World

from xlaserve.concurrency.workers import Workers
from xlaserve.residence.capacity import Capacity
from xlaserve.residence.control import ModelControl
from xlaserve.residence.loading import Machinery, VersionLoader
from xlaserve.residence.registry import Registry
from xlaserve.residence.repository.repositories import open_repositories
from xlaserve.serving.answers import Counting
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.stations.table import ExecutionPolicy, Stations
from xlaserve.settings import Settings
from xlaserve.settings.choices import ModelControlMode


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    made.may_load.set()
    made.may_execute.set()
    yield made
    made.may_load.set()
    made.may_execute.set()


@pytest.fixture
async def make_core(tmp_path: Path, world: World) -> AsyncIterator[MakeCore]:
    made: list[Core] = []

    def make(**changes: Any) -> Core:
        root, scratch = tmp_path / "repository", tmp_path / "scratch"
        root.mkdir(exist_ok=True)
        scratch.mkdir(exist_ok=True)
        values: dict[str, Any] = {
            "repository": root,
            "scratch_directory": scratch,
            "model_control_mode": ModelControlMode.EXPLICIT,
            "drain_seconds": 5.0,
            "background_compile": False,
        }
        settings = Settings(**values | changes)
        registry = Registry(settings.max_requests_per_model)
        workers = Workers(load_threads=2, execute_threads=2, max_abandoned=settings.max_abandoned)
        repository = open_repositories(settings)
        machinery = Machinery(
            load=world.load,
            predict_size=world.predict_size,
            try_loading=world.try_loading,
            release_memory=lambda: None,
            devices=lambda: world.devices,
        )
        capacity = Capacity()
        if settings.capacity_bytes:
            capacity.limit(dict.fromkeys(world.devices.names, settings.capacity_bytes))
        gates = Gates(observers=[Counting()])
        engine = Engine(registry, gates, workers.host)
        # Beyond what a busy machine makes of an execution that takes no time.
        policy = ExecutionPolicy(
            0.5,
            settings.max_requests_per_model,
            batching=settings.dynamic_batching,
            compile_seconds=settings.load_seconds,
        )
        loader = VersionLoader(
            registry,
            workers,
            machinery,
            capacity,
            make_station=Stations(workers, policy, engine).build,
            drain_seconds=settings.drain_seconds,
            load_seconds=settings.load_seconds,
            memory_wait_seconds=settings.memory_wait_seconds,
            expect_unloads=settings.modelmesh,
            evict=settings.evict,
            background_compile=settings.background_compile,
        )
        control = ModelControl(settings, registry, repository, loader, workers)
        core = Core(root, settings, registry, repository, control, gates, engine, workers, capacity)
        made.append(core)
        return core

    yield make
    world.may_load.set()
    world.may_execute.set()
    for core in made:
        await core.control.close()
        core.workers.close()


@pytest.fixture
def core(make_core: MakeCore) -> Core:
    return make_core()


@pytest.fixture
def add_model(tmp_path: Path) -> AddModel:
    """Write a model directory: the model's `amount` per version, and optionally a configuration."""

    def add(name: str, amounts: Mapping[int, Any], config: Mapping[str, Any] | None = None) -> Path:
        directory = tmp_path / "repository" / name
        for version, amount in amounts.items():
            (directory / str(version)).mkdir(parents=True, exist_ok=True)
            path = directory / str(version) / "amount.json"
            # Write a new file each time, as a careful deployment does.
            path.unlink(missing_ok=True)
            path.write_text(json.dumps(amount))
        if config is not None:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "config.json").write_text(json.dumps(config))
        return directory

    return add


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Disable the garbage collector, so that only reference counting frees objects."""
    gc.disable()
    yield
    gc.enable()
