"""Soak test: many models, a runtime with memory for few, and clients that cancel."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from support.held import Held, held
from support.mesh import Mesh, dial, outcome
from support.shelf import MIB, addition, export_adder, sums
from xlaserve.app.server import Application
from xlaserve.runtime import loaders
from xlaserve.runtime.devices import jax_runtime
from xlaserve.settings import Settings

MODELS = 200
ROOM = 20
"""Number of models that fit in memory."""

_VARIANTS = 20
"""Number of distinct models, so that answers from a wrong model are detected."""
_LOAD_THREADS = 2
_CLIENTS = 6
_LONGEST = 20
"""Maximum duration of a soak, as a multiple of the requested duration."""
_WARM_PART = 0.1
"""Fraction of the time after which the process is considered warm."""

# Probabilities of random choices.
_ANY_MODEL = 0.2  # else one that is loaded
_CANCELLED_LOAD = 0.2
_GREEDY_LOAD = 0.1  # without room for it
_CANCELLED_REQUEST = 0.05
_LATE_REQUEST = 0.05
_ASKED_WHEN_GONE = 0.5


@dataclass
class Report:
    """Counters and violations of a soak."""

    seconds: float
    capacity_bytes: int
    before: Held
    after: Held | None = None
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    """Violated invariants, in words."""
    most_bytes: int = 0
    """Maximum total size of the models that the mesh considered loaded."""
    most_booked_bytes: int = 0
    warm_bytes: int = 0
    """Resident memory of the warm process, and at the end."""
    end_bytes: int = 0

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        return (
            f"{self.seconds:.0f} s: {counts}\n"
            f"sum of sizes at most {self.most_bytes}, booked at most {self.most_booked_bytes}, "
            f"of {self.capacity_bytes} bytes; process {self.warm_bytes / MIB:.0f} MiB when warm, "
            f"{self.end_bytes / MIB:.0f} MiB at the end\n"
            f"before {self.before}\nafter  {self.after}\n"
            f"violations: {self.violations or 'none'}"
        )


async def soak(seconds: float, folder: Path, seed: int = 0, least_loads: int = 0) -> Report:
    """Run a server in this process, on a port and a Unix socket, and clients of both.

    `folder` must be empty and writable. A busy machine may take longer to reach `least_loads`,
    up to a limit.
    """
    jax_runtime.start("cpu")
    values = _export(folder / "models")
    size = max(max(loaders.predict_size(path).values()) for path in (folder / "models").glob("*/1"))
    capacity = ROOM * size
    async with _server(folder, capacity) as (application, addresses):
        async with dial(addresses[0]) as first, dial(addresses[1]) as second:
            for mesh in (first, second):
                await mesh.status()
            report = Report(seconds, capacity, held(application))
            sidecar = _Sidecar(application, (first, second), values, report, random.Random(seed))
            await sidecar.run(seconds, folder / "models", least_loads)
            await sidecar.end()
            report.after = held(application)
    return report


def _export(root: Path) -> dict[str, int]:
    """Export every model with its own computation; return the number that each one adds."""
    values = {f"model-{number}": number % _VARIANTS for number in range(MODELS)}
    for number, (model, value) in enumerate(values.items(), start=1):
        export_adder(root / model / "1", value, computation=number)
    return values


@asynccontextmanager
async def _server(
    folder: Path, capacity: int
) -> AsyncIterator[tuple[Application, tuple[str, str]]]:
    (folder / "repository").mkdir()
    application = Application(
        Settings.read(
            {},
            repository=folder / "repository",
            modelmesh=True,
            model_root=(folder / "models",),
            grpc_endpoint="port:0",
            grpc_data_endpoint=f"unix:{folder}/grpc.sock",
            http_endpoint="none",
            device="cpu",
            capacity_bytes=capacity,
            mesh_slack_bytes=0,
            memory_wait_seconds=0.1,
            default_model_size_bytes=MIB // 2,
            load_threads=_LOAD_THREADS,
            compile_processes=0,
        )
    )
    async with application.running() as addresses:
        await application.load()
        yield application, (addresses.grpc, addresses.grpc_data)


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """One load of a model; each load gets a new object."""

    size_bytes: int


class _Sidecar:
    """An LRU cache of models, as in a mesh."""

    def __init__(
        self,
        application: Application,
        meshes: Sequence[Mesh],
        values: Mapping[str, int],
        report: Report,
        chance: random.Random,
    ) -> None:
        self._application = application
        self._meshes = meshes
        self._values = values
        self._report = report
        self._random = chance
        self._models = list(values)
        self._loaded: dict[str, _Copy] = {}
        """Loaded models, least recently used first."""
        self._coming: dict[str, int] = {}
        """Predicted size of each loading model."""
        self._going: dict[str, int] = {}
        """Size of each unloading model."""
        self._gone: dict[str, object] = {}
        """Marks each model whose unload succeeded, until somebody loads it again."""
        self._loads = asyncio.Semaphore(_LOAD_THREADS)

    async def run(self, seconds: float, root: Path, least_loads: int) -> None:
        """Run the clients for this long, or longer until there were enough loads."""
        begun = time.monotonic()

        def is_over() -> bool:
            passed = time.monotonic() - begun
            enough = self._report.counts["loads"] >= least_loads
            return passed > (seconds if enough else _LONGEST * seconds)

        async with asyncio.TaskGroup() as group:
            for _ in range(_CLIENTS):
                group.create_task(self._client(is_over, root))
            group.create_task(self._watch(is_over, begun + _WARM_PART * seconds))

    async def end(self) -> None:
        """Unload half of the models, then reconnect as a mesh that does not know the rest."""
        for model in self._models[::2]:
            await self._unload(model)
        await self._meshes[0].status()
        rows = await self._application.control.catalog.index()
        if rows:
            self._violation(f"after the purge there is {rows}")
        if streams := self._application.grpc.open_streams:
            self._violation(f"{streams} streams are left on the connections")

    @property
    def _mesh(self) -> Mesh:
        return self._random.choice(self._meshes)

    def _violation(self, text: str) -> None:
        if len(self._report.violations) < 20:
            self._report.violations.append(text)

    def _count(self, what: str) -> None:
        self._report.counts[what] += 1

    async def _watch(self, is_over: Callable[[], bool], warm: float) -> None:
        """Check the memory totals continuously."""
        report, process = self._report, psutil.Process()
        while not is_over():
            total = self._loaded_bytes + sum(self._going.values())
            report.most_bytes = max(report.most_bytes, total)
            booked = self._application.capacity.used_bytes
            report.most_booked_bytes = max(report.most_booked_bytes, booked)
            if max(total, booked) > report.capacity_bytes:
                self._violation(f"{total} bytes are held, {booked} are booked")
            if not report.warm_bytes and time.monotonic() > warm:
                report.warm_bytes = process.memory_info().rss
            await asyncio.sleep(0.001)
        report.end_bytes = process.memory_info().rss

    async def _client(self, is_over: Callable[[], bool], root: Path) -> None:
        while not is_over():
            loaded = list(self._loaded)
            if loaded and self._random.random() > _ANY_MODEL:
                await self._ask(self._random.choice(loaded))
                continue
            model = self._random.choice(self._models)
            if self._is_anywhere(model) or self._loads.locked():
                await self._ask(model)
                continue
            async with self._loads:
                if not self._is_anywhere(model):
                    await self._load(model, root / model)

    def _is_anywhere(self, model: str) -> bool:
        return any(model in models for models in (self._loaded, self._coming, self._going))

    # --- requests ---

    async def _ask(self, model: str) -> None:
        """Send a request, sometimes with a short timeout or cancelled; check the answer."""
        gone, copy = self._gone.get(model), self._loaded.pop(model, None)
        if copy is not None:
            self._loaded[model] = copy  # most recently used now
        chosen = self._random.random()
        timeout = self._random.uniform(1e-4, 3e-3) if chosen < _LATE_REQUEST else None
        x = self._random.randrange(1000)
        call = self._mesh.infer(model, addition(x, 0), timeout=timeout)
        if 1 - chosen < _CANCELLED_REQUEST:
            await asyncio.sleep(self._random.uniform(0, 2e-3))
            call.cancel()
        try:
            status, text = await outcome(call)
        except asyncio.CancelledError:
            self._count("cancelled requests")
            return
        if status == "OK":
            self._check_answer(model, x, sums(await call), gone)
        elif status == "DEADLINE_EXCEEDED" and timeout is not None:
            self._count("requests that were too late")
        elif status == "NOT_FOUND":
            self._count("requests for what is not loaded")
            if copy is not None and self._loaded.get(model) is copy:
                self._violation(f"{model} was loaded, but {text}")
        elif status == "UNAVAILABLE":
            self._count("requests for what comes or goes")
        else:
            self._violation(f"a request to {model} ended with {status}: {text}")

    def _check_answer(self, model: str, x: int, answer: list[float], gone: object) -> None:
        self._count("inferences")
        if gone is not None and self._gone.get(model) is gone:
            self._violation(f"{model} was served after its unload was OK")
        if answer != [x + self._values[model], self._values[model]]:
            self._violation(f"{model} was not what answered")

    # --- management ---

    async def _load(self, model: str, path: Path) -> None:
        """Evict and load; sometimes skip the eviction, sometimes cancel the load."""
        greedy = self._random.random() < _GREEDY_LOAD
        predicted = (await self._mesh.predict(model, path)).sizeInBytes
        self._count("predictions")
        if self._is_anywhere(model):
            return
        self._coming[model] = predicted
        self._gone.pop(model, None)
        while not greedy and self._loaded and self._needed > self._report.capacity_bytes:
            await self._unload(next(iter(self._loaded)))
        size = await self._try_load(model, path)
        del self._coming[model]
        if size:
            self._loaded[model] = _Copy(size)
        else:
            await self._unload(model)

    @property
    def _loaded_bytes(self) -> int:
        return sum(copy.size_bytes for copy in self._loaded.values())

    @property
    def _needed(self) -> int:
        return self._loaded_bytes + sum(self._coming.values()) + sum(self._going.values())

    async def _try_load(self, model: str, path: Path) -> int:
        call = self._mesh.load(model, path)
        task = asyncio.ensure_future(outcome(call))
        if self._random.random() < _CANCELLED_LOAD:
            await asyncio.sleep(self._random.uniform(0, 0.2))
            call.cancel()
        try:
            status, text = await task
        except asyncio.CancelledError:
            self._count("cancelled loads")
            await asyncio.sleep(self._random.uniform(0, 0.5))
            return 0
        if status == "OK":
            self._count("loads")
            return int((await call).sizeInBytes)
        self._count("refused loads")
        if status != "RESOURCE_EXHAUSTED":
            self._violation(f"a load of {model} ended with {status}: {text}")
        return 0

    async def _unload(self, model: str) -> None:
        """Unload, which must succeed; sometimes send a request, which must then fail."""
        copy = self._loaded.pop(model, None)
        self._going[model] = copy.size_bytes if copy else 0
        status, text = await outcome(self._mesh.unload(model))
        del self._going[model]
        self._count("unloads")
        if status != "OK":
            self._violation(f"an unload of {model} ended with {status}: {text}")
        self._gone[model] = object()
        if self._random.random() < _ASKED_WHEN_GONE:
            await self._ask(model)
