"""A mesh drives a server of several processes as one runtime."""

import asyncio
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support import identity_models, mesh, several
from support.mesh import Mesh
from support.mesh_books import MeshBooks, any_of, first
from support.process import served
from support.shelf import export_adder

from xlaserve.runtime import loaders

MIB = 1 << 20


async def ready_status(sidecar: Mesh) -> Any:
    """Poll, as a mesh does, until the runtime is ready."""
    while True:
        status = await sidecar.status()
        if status.status == mesh.message("mmesh.RuntimeStatusResponse").READY:
            return status
        await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_a_mesh_sees_one_runtime(tmp_path: Path) -> None:
    """Capacity and sizes cover all workers, and every worker has the loaded models."""
    (tmp_path / "repository").mkdir()
    identity_models.write(tmp_path / "shelf", "echo", "FP32", [-1])
    flags = ("--modelmesh", "--model-root", str(tmp_path), "--capacity-bytes", str(1024 * MIB))
    many = ("--processes", "2", "--mesh-slack-bytes", str(24 * MIB))
    async with served(tmp_path / "repository", *flags, *many) as server:
        await server.until(several.READY)
        async with mesh.dial(server.url) as sidecar:
            status = await ready_status(sidecar)
            loaded = await sidecar.load("id-1", tmp_path / "shelf" / "echo")
            size = await sidecar.size("id-1")
            there = await several.connections_ready(server.http, "id-1", 8)
            await sidecar.unload("id-1")
            gone = await several.connections_ready(server.http, "id-1", 8)
            await sidecar.load("id-1", tmp_path / "shelf" / "echo")
            await ready_status(sidecar)
            purged = await several.connections_ready(server.http, "id-1", 8)

    assert 1000 * MIB == status.capacityInBytes
    assert loaded.sizeInBytes == size.sizeInBytes
    assert 0 == size.sizeInBytes % 2
    assert ({200}, {404}, {404}) == (there, gone, purged)


STEPS = ("alike-1", "alike-2", "alone", "-alike-1", "alike-1", "-alone", "-alike-2", "-alike-1")
"""Loads and evictions by a mesh: two models share a computation, and one has another."""


def shelf(root: Path) -> Mapping[str, Path]:
    """Write the models, and return their paths by name."""
    export_adder(root / "alike-1" / "1", 1)
    shutil.copytree(root / "alike-1", root / "alike-2")
    export_adder(root / "alone" / "1", 2, bytes_besides=MIB, computation=1)
    return {path.name: path for path in root.iterdir()}


async def walked(tmp_path: Path, processes: int) -> list[tuple[str, str, Mapping[str, int], Any]]:
    """Return the sizes reported to a mesh at each step, and which models answer."""
    flags = ("--modelmesh", "--model-root", str(tmp_path), "--processes", str(processes))
    sizes = ("--capacity-bytes", str(1024 * MIB), "--mesh-slack-bytes", str(24 * MIB))
    paths = {path.name: path for path in (tmp_path / "shelf").iterdir()}
    until = several.READY if processes > 1 else "started"
    seen: list[tuple[str, str, Mapping[str, int], Any]] = []
    async with served(tmp_path / "repository", *flags, *sizes) as server:
        await server.until(until)
        async with mesh.dial(server.url) as sidecar:
            status = await ready_status(sidecar)
            books = MeshBooks(sidecar, status.capacityInBytes, paths)
            for step in STEPS:
                model = step.removeprefix("-")
                ended = ("OK", "")
                if step.startswith("-"):
                    await books.evict(model)
                else:
                    ended = await books.load(model)
                there = await several.connections_ready(server.http, model, 4)
                told = {one: (await sidecar.size(one)).sizeInBytes for one in books.told}
                assert told == books.told
                seen.append((step, ended[0], told, there))
    return seen


@pytest.mark.slow
async def test_a_mesh_loads_and_unloads_in_several_processes_as_in_one(tmp_path: Path) -> None:
    """Sizes cover all processes: twice those of one, or less if a program is shared.

    The model that carries the shared program is evicted first.
    """
    (tmp_path / "repository").mkdir()
    shelf(tmp_path / "shelf")
    one, two = [await walked(tmp_path, processes) for processes in (1, 2)]

    assert [step for step, *_ in one] == list(STEPS) == [step for step, *_ in two]
    assert {"OK"} == {ended for _, ended, *_ in (*one, *two)}
    statuses = [{404} if step.startswith("-") else {200} for step in STEPS]
    assert statuses == [there for *_, there in one] == [there for *_, there in two]
    for (_, _, of_one, _), (_, _, of_two, _) in zip(one, two, strict=True):
        assert of_one.keys() == of_two.keys()
        assert all(0 < size <= 2 * of_one[name] for name, size in of_two.items())
        assert all(size % 2 == 0 for size in of_two.values())
    # The first model shares no program yet.
    assert 2 * one[0][2]["alike-1"] == two[0][2]["alike-1"]


UNEVEN = {"small-1": 0, "small-2": 0, "middle": 300_000, "large": 900_000}
"""Parameter bytes of models of uneven sizes; each program has about half a megabyte."""
WALK = 30
USED = ("xlaserve_capacity_used_bytes ", "xlaserve_capacity_used_bytes{")


def uneven(root: Path) -> Mapping[str, Path]:
    """Write three models of each of four computations, and one that fails to load."""
    for number, (name, besides) in enumerate(UNEVEN.items(), start=1):
        export_adder(root / f"{name}-1" / "1", 1, bytes_besides=besides, computation=number)
        for other in ("2", "3"):
            shutil.copytree(root / f"{name}-1", root / f"{name}-{other}")
    (root / "broken/1").mkdir(parents=True)
    (root / "broken/1/model.json").write_text("{}")
    return {path.name: path for path in sorted(root.iterdir())}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_mesh_walks_over_several_processes_and_nothing_is_refused(
    tmp_path: Path, seed: int
) -> None:
    """Its cache holds only some models: it evicts any, or the first, which carries programs."""
    (tmp_path / "repository").mkdir()
    paths = uneven(tmp_path / "shelf")
    alone = loaders.predict_size(paths["large-1"] / "1")["cpu:0"]
    # Each of two processes has a copy of every loaded model.
    capacity, slack = 2 * 4 * alone, 2 * 600_000
    flags = ("--modelmesh", "--model-root", str(tmp_path), "--processes", "2")
    sizes = ("--capacity-bytes", str(capacity + slack), "--mesh-slack-bytes", str(slack))
    chance = random.Random(seed)
    choose = any_of(chance) if seed % 2 else first
    ended: dict[str, set[str]] = {}
    seen: list[tuple[int, float]] = []
    async with served(
        tmp_path / "repository", *flags, *sizes, "--default-model-size-bytes", "1"
    ) as server:
        await server.until(several.READY)
        async with mesh.dial(server.url) as sidecar, aiohttp.ClientSession() as session:
            status = await ready_status(sidecar)
            books = MeshBooks(sidecar, status.capacityInBytes, paths, choose)
            for _ in range(WALK):
                model = chance.choice(sorted(paths))
                if model in books.told:
                    await books.evict(model)
                else:
                    ended.setdefault(model, set()).add((await books.load(model))[0])
                async with session.get(f"http://{server.http}/metrics") as answer:
                    lines = (await answer.text()).splitlines()
                used = sum(float(one.split()[-1]) for one in lines if one.startswith(USED))
                seen.append((books.believed_bytes, used))

    assert [] == [(believed, used) for believed, used in seen if used > believed + slack]
    assert max(used for _, used in seen) > status.capacityInBytes // 4
    assert {"FAILED_PRECONDITION"} == ended.pop("broken", {"FAILED_PRECONDITION"})
    assert {"OK"} == set().union(*ended.values())
