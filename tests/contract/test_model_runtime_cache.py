"""A runtime under a mesh's cache, which admits by prediction and evicts later."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import mesh
from support.mesh_cache import MeshCache, Registered
from support.server import Serve
from support.shelf import addition, export_adder

from xlaserve.runtime import loaders
from xlaserve.settings.choices import ModelControlMode

MODELS, FIT = 40, 10
"""Number of models, and how many nearly fit in memory."""
CLIENTS = 3


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty models of equal size, and two that are three times as large.

    Each has its own computation: models that share programs would add almost nothing.
    """
    root = tmp_path_factory.mktemp("alike")
    for index in range(MODELS):
        export_adder(root / f"m{index}/1", 1, computation=1 + index)
    for index in range(2):
        besides = 2 * size_of(root)
        export_adder(root / f"large{index}/1", 1, bytes_besides=besides, computation=101 + index)
    return root


def size_of(shelf: Path, name: str = "m0") -> int:
    return loaders.predict_size(shelf / name / "1")["cpu:0"]


def registered(shelf: Path, kind: str) -> Mapping[str, Registered]:
    """Return what a mesh knows; with a puller it does not know where the files will be."""
    paths = {path.name: path for path in shelf.iterdir()}
    return {
        name: Registered(str(path), str(path) if kind == "files" else f"storage/{name}")
        for name, path in paths.items()
    }


@asynccontextmanager
async def runtime(serve: Serve, shelf: Path, tmp_path: Path, **more: Any) -> AsyncIterator[Any]:
    """Run a server with memory for nearly FIT models; the default size is a quarter of one."""
    (tmp_path / "repository").mkdir()
    settings: dict[str, Any] = {
        "modelmesh": True,
        "model_control_mode": ModelControlMode.NONE,
        "model_root": (shelf,),
        "capacity_bytes": FIT * size_of(shelf) - size_of(shelf) // 3,
        "default_model_size_bytes": size_of(shelf) // 4,
    }
    async with serve(tmp_path / "repository", **settings | more) as server:
        async with mesh.dial(server.url) as sidecar:
            yield SimpleNamespace(mesh=sidecar, application=server.application)


async def outcomes(cache: MeshCache, names: Sequence[str]) -> Counter[str]:
    """Send a request for each name, several at a time, and count the outcomes."""
    found: Counter[str] = Counter()
    queue = iter(names)

    async def client() -> None:
        for name in queue:
            found[(await cache.infer(name, addition()))[0]] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    await cache.settle()
    assert not cache.counts["failed unloads"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["files", "puller"])
async def test_models_that_are_larger_than_predicted_are_all_served(
    serve: Serve, shelf: Path, tmp_path: Path, kind: str, threads: int
) -> None:
    """No load is refused, the cache is never emptied: sizes are learned, slack absorbs errors."""
    names = [f"m{index}" for index in range(MODELS)]
    names += random.Random(7).choices(names, k=FIT)
    async with runtime(serve, shelf, tmp_path, load_threads=threads) as running:
        cache = MeshCache(running.mesh, await running.mesh.status(), registered(shelf, kind))
        found = await outcomes(cache, names)
        used = running.application.capacity.used_bytes

    assert {"OK": len(names)} == found
    assert (0, 0) == (cache.counts["failed loads"], cache.counts["emptied"])
    assert 0.7 * FIT * size_of(shelf) < used <= FIT * size_of(shelf)


@pytest.mark.slow
async def test_a_load_waits_for_what_the_mesh_evicts_when_it_knows_another_size(
    serve: Serve, shelf: Path, tmp_path: Path
) -> None:
    """The slack covers one underestimated model; the second one follows immediately."""
    size, large = size_of(shelf), size_of(shelf, "large0")
    settings = {"capacity_bytes": 7 * size + large, "mesh_slack_bytes": large - size}
    async with runtime(serve, shelf, tmp_path, load_threads=2, **settings) as running:
        ready = await running.mesh.status()
        cache = MeshCache(running.mesh, ready, registered(shelf, "puller"))
        first = await outcomes(cache, [f"m{index}" for index in range(7)])
        second = await outcomes(cache, ["large0", "large1"])

    assert ({"OK": 7}, {"OK": 2}) == (first, second)
    assert cache.counts["over-allocations"]


@pytest.mark.slow
async def test_a_mesh_that_starts_over_a_restarted_runtime_has_all_its_memory(
    serve: Serve, shelf: Path, tmp_path: Path
) -> None:
    """The runtime's models were loaded without the mesh, which does not know them."""
    models = registered(shelf, "puller")
    async with runtime(serve, shelf, tmp_path) as running:
        known = SimpleNamespace(
            capacityInBytes=9 * size_of(shelf),
            defaultModelSizeInBytes=size_of(shelf),
            maxLoadingConcurrency=1,
        )
        running.mesh.paths = {"inference.GRPCInferenceService/ModelInfer": [1]}
        first = await outcomes(MeshCache(running.mesh, known, models), [f"m{i}" for i in range(8)])
        cache = MeshCache(running.mesh, await running.mesh.status(), models)
        second = await outcomes(cache, [f"m{index}" for index in range(10, 22)])

    assert ({"OK": 8}, {"OK": 12}) == (first, second)
