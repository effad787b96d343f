"""Memory accounting of models that share programs, as a Hypothesis state machine."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from xlaserve.authoring.export import export_model
from xlaserve.concurrency.workers import Workers
from xlaserve.errors import LoadFailed, ModelNotFound, OutOfMemory
from xlaserve.model_config.config import ModelConfig
from xlaserve.residence.capacity import Capacity
from xlaserve.residence.control import ModelControl
from xlaserve.residence.loading import Machinery, VersionLoader
from xlaserve.residence.registry import Registry
from xlaserve.residence.repository.repositories import open_repositories
from xlaserve.runtime import loaders
from xlaserve.runtime.devices import jax_runtime
from xlaserve.runtime.devices.placement import ONE_CPU
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import ModelMemory
from xlaserve.runtime.programs import cache_key, programs
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.programs.compilation_cache import CompilationCache
from xlaserve.runtime.programs.shared_programs import SharedPrograms
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.stations.table import ExecutionPolicy, Stations
from xlaserve.settings import Settings
from xlaserve.settings.choices import ModelControlMode

NAMES = st.sampled_from(["a", "b", "c", "d"])
COMPUTATIONS: list[Callable[[jax.Array, jax.Array], jax.Array]] = [
    lambda w, x: x * w[None, :],
    lambda w, x: x + w[None, :],
    lambda w, x: x - w[None, :],
]
KINDS = st.integers(0, len(COMPUTATIONS) - 1)
FACTORS = st.sampled_from([2, 3])
X = np.array([[1, 2], [3, 4]], np.float32)


class Shelf:
    """Fine-tunes of three computations on disk, and the memory that one of each holds alone."""

    def __init__(self, root: Path) -> None:
        jax_runtime.start("cpu")
        cache = CompilationCache(root / "cache", 1 << 30)
        cache.prepare(cache_key.target_of("cpu", jax.local_devices()[0].device_kind))
        self.compilation = Compilation(cache)
        self.alone: list[ModelMemory] = []
        for kind, fn in enumerate(COMPUTATIONS):
            for factor in (2, 3):
                path, params = root / f"{kind}-{factor}" / "1", np.full(2, factor, np.float32)
                inputs = {"x": ("FP32", [-1, 2])}
                export_model(fn, params, inputs, path, outputs=["y"], max_batch_size=2)
            context = LoadContext("m", "1", ModelConfig(), compilation=self.compilation)
            model = loaders.load(root / f"{kind}-2" / "1", context)
            self.alone.append(model.info.memory)
            model.close()
        self._root = root

    def put(self, kind: int, factor: int, place: Path) -> None:
        """Have the next load from this directory yield this model."""
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self._root / f"{kind}-{factor}", place)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"))


class Failing:
    """Makes the executions of a warm-up fail."""

    is_on = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seconds = programs._seconds

        def perhaps(*arguments: object) -> float:
            if self.is_on:
                raise jax.errors.JaxRuntimeError("INTERNAL: no such luck")
            return seconds(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(programs, "_seconds", perhaps)


class Books(RuleBasedStateMachine):
    """Loads, reloads, unloads, failures and evictions, sequential and concurrent."""

    def __init__(self, shelf: Shelf, failing: Failing) -> None:
        super().__init__()
        self.shelf, self.failing = shelf, failing
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.root = Path(self.folder.name)
        self.wanted: dict[str, tuple[int, int]] = {}
        """Kind and factor of the model on disk, by name."""
        self.serving: dict[str, tuple[int, int]] = {}
        """Kind and factor of the serving model, by name."""

    @initialize(fits=st.sampled_from([1.3, 2.2, 4.0]))
    def begin(self, fits: float) -> None:
        """Build a core with memory for this many computations."""
        repository, scratch = self.root / "repository", self.root / "scratch"
        repository.mkdir()
        scratch.mkdir()
        configured = Settings(
            repository=repository,
            scratch_directory=scratch,
            model_control_mode=ModelControlMode.EXPLICIT,
            evict=True,
            memory_wait_seconds=0.0,
        )
        self.registry = Registry(100)
        self.workers = Workers(load_threads=2, execute_threads=1)
        self.pool = SharedPrograms()
        machinery = Machinery(
            load=loaders.load,
            predict_size=loaders.predict_size,
            try_loading=lambda path, config, check_cancelled: None,
            release_memory=lambda: None,
            devices=lambda: ONE_CPU,
            compilation=self.shelf.compilation,
            programs=self.pool,
        )
        self.capacity = Capacity()
        most = max(memory.total_bytes for memory in self.shelf.alone)
        self.capacity.limit({"cpu:0": int(fits * 1.5 * most)})
        engine = Engine(self.registry, Gates(), self.workers.host)
        policy = ExecutionPolicy(0.5, 100, batching=False, compile_seconds=60)
        self.loader = VersionLoader(
            self.registry,
            self.workers,
            machinery,
            self.capacity,
            make_station=Stations(self.workers, policy, engine).build,
            drain_seconds=5.0,
            evict=True,
        )
        self.control = ModelControl(
            configured,
            self.registry,
            open_repositories(configured),
            self.loader,
            self.workers,
        )

    def teardown(self) -> None:
        """Unload everything, and check that nothing is held or shared afterwards."""
        if hasattr(self, "control"):
            for name in list(self.wanted):
                self.runner.run(self._unload(name))
            assert 0 == self.capacity.used_bytes
            assert (0, 0) == self.pool.counts
            self.runner.run(self.control.close())
            self.workers.close()
        self.runner.close()
        self.folder.cleanup()

    async def _load(self, name: str) -> None:
        try:
            await self.control.load(name)
        except (OutOfMemory, LoadFailed):
            return
        self.serving[name] = self.wanted[name]

    async def _unload(self, name: str) -> None:
        try:
            await self.control.unload(name)
        except ModelNotFound:
            return

    def _put(self, name: str, kind: int, factor: int) -> None:
        self.shelf.put(kind, factor, self.root / "repository" / name)
        self.wanted[name] = kind, factor

    @rule(name=NAMES, kind=KINDS, factor=FACTORS)
    def load(self, name: str, kind: int, factor: int) -> None:
        """Load or reload, perhaps as another computation."""
        self._put(name, kind, factor)
        self.runner.run(self._load(name))

    @rule(name=NAMES, kind=KINDS)
    def fail(self, name: str, kind: int) -> None:
        """Have a load fail once it has compiled."""
        self._put(name, kind, 2)
        self.failing.is_on = True
        try:
            self.runner.run(self._load(name))
        finally:
            self.failing.is_on = False

    @rule(name=NAMES)
    def unload(self, name: str) -> None:
        """Unload the model if it is loaded."""
        self.runner.run(self._unload(name))

    @rule(kinds=st.lists(KINDS, min_size=2, max_size=2), leaving=NAMES)
    def together(self, kinds: list[int], leaving: str) -> None:
        """Load two models concurrently while another one unloads."""
        names = [name for name in ("a", "b", "c") if name != leaving][:2]
        for name, kind in zip(names, kinds, strict=True):
            self._put(name, kind, 3)

        async def all_at_once() -> None:
            await asyncio.gather(*map(self._load, names), self._unload(leaving))

        self.runner.run(all_at_once())

    def _loaded(self) -> dict[str, tuple[int, int]]:
        return {name: self.serving[name] for name in self.wanted if self.registry.ready(name)}

    @invariant()
    def books_are_what_is_held(self) -> None:
        """Memory is reserved once per computation, plus parameters and scratch memory per model."""
        if not hasattr(self, "control"):
            return
        loaded = self._loaded()
        alone = self.shelf.alone
        expected = sum(alone[kind].executables_bytes for kind in {k for k, _ in loaded.values()})
        for kind, _ in loaded.values():
            expected += alone[kind].total_bytes - alone[kind].executables_bytes
        instances = [self.registry.resolve(name)[1] for name in loaded]

        assert expected == self.capacity.used_bytes
        assert expected == sum(instance.info.memory.total_bytes for instance in instances)
        assert len({kind for kind, _ in loaded.values()}) == self.pool.counts[0]

    @invariant()
    def programs_have_owners_that_are_loaded(self) -> None:
        """No program in use is dropped, and each model answers with its own parameters."""
        if not hasattr(self, "control"):
            return
        leases = set()
        for name, (kind, factor) in self._loaded().items():
            runner = self.registry.resolve(name)[1].runner
            leases.add(runner._stock._lease)  # type: ignore[attr-defined]
            found = runner.execute({"x": X})["y"]  # type: ignore[attr-defined]
            expected = COMPUTATIONS[kind](jax.numpy.full(2, factor, "float32"), X)  # type: ignore[arg-type]
            assert np.array_equal(np.asarray(expected), found)
        for computation in self.pool._computations.values():
            assert set(computation.leases) <= leases
            for program in computation.programs.values():
                assert program.users.keys()
                assert program.users.keys() <= leases


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    monkeypatch.setattr(programs, "_ALIKE_SECONDS", 3600.0)
    return Failing(monkeypatch)


@pytest.mark.slow
def test_books_are_what_is_held(shelf: Shelf, failing: Failing) -> None:
    run_state_machine_as_test(
        lambda: Books(shelf, failing),  # type: ignore[arg-type]
        settings=settings(
            max_examples=12,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
