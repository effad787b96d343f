"""A ModelMesh of two runtimes, without Kubernetes; see README.md."""

import asyncio
import sys
from collections import Counter, OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from grpclib.client import Channel

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1] / "tools")]

from serving import served

from shared_models import parameters_of, tune
from xlaserve import export_model
from xlaserve.client import AsyncClient
from xlaserve_proto import mmesh

MODELS, REQUESTS, WIDTH = 12, 150, 600
CAPACITY = 8_000_000
"""Memory of each runtime for models, in bytes: enough for some of the twelve."""


@dataclass
class Runtime:
    """A runtime from the mesh's point of view."""

    name: str
    address: str
    free: int = 0
    loaded: "OrderedDict[str, int]" = field(default_factory=OrderedDict[str, int])
    """Sizes of its loaded models, least recently used first."""


class Mesh:
    """Places models on runtimes, as a sidecar does, and unloads the least recently used ones."""

    def __init__(self, runtimes: list[Runtime], models: Path) -> None:
        self._runtimes = runtimes
        self._models = models
        self.counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Ask each runtime whether it is ready, and for its capacity."""
        for runtime in self._runtimes:
            status = await self._manage(runtime, "runtime_status", mmesh.RuntimeStatusRequest())
            if status.status != mmesh.RuntimeStatusResponseStatus.READY:
                sys.exit(f"{runtime.name} is not ready")
            runtime.free = status.capacity_in_bytes
            print(f"{runtime.name} has room for {runtime.free} bytes")

    async def infer(self, model: str, x: np.ndarray) -> np.ndarray:
        """Send a request to the runtime that has the model; load it first if none has."""
        runtime = next((each for each in self._runtimes if model in each.loaded), None)
        self.counts["hits" if runtime else "misses"] += 1
        runtime = runtime or await self._load(model)
        runtime.loaded.move_to_end(model)
        async with AsyncClient(runtime.address) as client:
            answer: np.ndarray = (await client.infer(model, {"x": x}))["y"]
        return answer

    async def _load(self, model: str) -> Runtime:
        runtime = max(self._runtimes, key=lambda each: each.free)
        asked = mmesh.LoadModelRequest(model, "mt:jax:1", str(self._models / model), "{}")
        predicted = mmesh.PredictModelSizeRequest(model, "mt:jax:1", asked.model_path, "{}")
        size = (await self._manage(runtime, "predict_model_size", predicted)).size_in_bytes
        # Unload before the load: a full runtime would wait for memory, and then refuse.
        while runtime.loaded and runtime.free < size:
            await self._evict(runtime)
        loaded = await self._manage(runtime, "load_model", asked)
        runtime.loaded[model] = loaded.size_in_bytes
        runtime.free -= loaded.size_in_bytes
        return runtime

    async def _evict(self, runtime: Runtime) -> None:
        model, size = runtime.loaded.popitem(last=False)
        await self._manage(runtime, "unload_model", mmesh.UnloadModelRequest(model))
        runtime.free += size
        self.counts["evictions"] += 1

    async def _manage(self, runtime: Runtime, method: str, message: object) -> Any:
        host, _, port = runtime.address.rpartition(":")
        async with Channel(host, int(port)) as channel:
            return await getattr(mmesh.ModelRuntimeStub(channel), method)(message)


async def used(mesh: Mesh, models: Path) -> int:
    """Send requests for models by Zipf's law, and return the number of wrong answers."""
    random = np.random.default_rng(0)
    x = random.standard_normal((1, WIDTH)).astype(np.float32)
    chances = 1 / np.arange(1, MODELS + 1)
    wrong = 0
    for number in random.choice(MODELS, REQUESTS, p=chances / chances.sum()):
        model = f"model-{number}"
        (matrix,) = parameters_of(models / model / "1").values()
        wrong += not np.allclose(x @ matrix, await mesh.infer(model, x), rtol=1e-3, atol=1e-3)
    return wrong


def main() -> None:
    """Start two small runtimes, and have a mesh move twelve models through them."""
    with TemporaryDirectory() as folder, ExitStack() as running:
        models = Path(folder, "models")
        exported = Path(folder, "exported/1")
        export_model(
            lambda matrix, x: x @ matrix,
            np.zeros((WIDTH, WIDTH), np.float32),
            {"x": ("FP32", [-1, WIDTH])},
            exported,
            outputs=["y"],
            max_batch_size=2,
        )
        for number in range(MODELS):
            tune(exported, models / f"model-{number}" / "1", number)
        runtimes = []
        for name in ("runtime-0", "runtime-1"):
            sizes = (str(CAPACITY), "--default-model-size-bytes", str(CAPACITY // 10))
            flags = ("--modelmesh", "--capacity-bytes", *sizes)
            server = running.enter_context(served(models, *flags))
            runtimes.append(Runtime(name, server.grpc))
        mesh = Mesh(runtimes, models)

        async def run() -> int:
            await mesh.start()
            return await used(mesh, models)

        wrong = asyncio.run(run())
        for runtime in runtimes:
            print(f"{runtime.name} holds {', '.join(runtime.loaded)}")
        print(", ".join(f"{count} {what}" for what, count in sorted(mesh.counts.items())))
        print(f"{REQUESTS} requests, {wrong} wrong")
        if wrong or not mesh.counts["evictions"] or not all(each.loaded for each in runtimes):
            sys.exit("that is not what was expected")


if __name__ == "__main__":
    main()
