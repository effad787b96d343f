"""The memory a mesh believes to be used matches reality, in any eviction order."""

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import mesh
from support.conditions import MOST_SECONDS, until
from support.mesh_books import MeshBooks, any_of, first
from support.runtime import StartRuntime
from support.shelf import export_adder

from xlaserve.residence.capacity import Capacity
from xlaserve.runtime import loaders

WAIT_SECONDS = 3600
"""Load timeout: nothing that waits may time out within a test."""
COMPUTATIONS = {"small-1": 0, "small-2": 0, "middle": 300_000, "large": 900_000}
"""Bytes of parameters, to vary sizes: each one's program has about half a megabyte."""
MODELS = 3
"""Number of models per computation."""
STEPS = 40


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models of each of four computations, and one that fails to load."""
    root = tmp_path_factory.mktemp("uneven")
    for number, (name, besides) in enumerate(COMPUTATIONS.items(), start=1):
        path = root / f"{name}-1"
        export_adder(path / "1", 1, bytes_besides=besides, computation=number)
        for other in range(2, 1 + MODELS):
            shutil.copytree(path, root / f"{name}-{other}")
    broken = root / "broken/1"
    broken.mkdir(parents=True)
    (broken / "model.json").write_text("{}")
    return root


def alone_bytes(shelf: Path, name: str) -> int:
    return loaders.predict_size(shelf / name / "1")["cpu:0"]


def settings(shelf: Path, **more: Any) -> dict[str, Any]:
    """Return settings with which little memory is withheld from the mesh."""
    return {
        "model_root": (shelf,),
        "default_model_size_bytes": 1,
        "mesh_slack_bytes": 0,
        "memory_wait_seconds": WAIT_SECONDS,
        "load_threads": 1,
        **more,
    }


def paths(shelf: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(shelf.iterdir())}


@pytest.mark.parametrize("slack", [0, 1 << 20])
async def test_room_that_the_first_of_a_computation_leaves_is_there(
    start: StartRuntime, shelf: Path, slack: int
) -> None:
    """The others keep the program in memory, which the mesh counts as free."""
    alone = alone_bytes(shelf, "small-1-1")
    other = alone_bytes(shelf, "small-2-1")
    # One byte too little for both models of the first computation plus another one.
    capacity = alone + 20 + other - 1 + slack
    more = {"capacity_bytes": capacity, "mesh_slack_bytes": slack}
    async with start(**settings(shelf, **more)) as runtime:
        told_of = (await runtime.mesh.status()).capacityInBytes
        books = MeshBooks(runtime.mesh, told_of, paths(shelf))
        ended = [await books.load(name) for name in ("small-1-1", "small-1-2", "small-2-1")]
        used = runtime.held().booked_bytes

    assert [("OK", "")] * 3 == ended
    assert used <= books.believed_bytes + slack
    assert "small-1-1" == (books.evicted or ["small-1-1"])[0]


@pytest.mark.parametrize("slack", [0, 600_000, 3_000_000])
@pytest.mark.parametrize("seed", [1, 2])
async def test_the_mesh_never_believes_less_to_be_held_than_is(
    start: StartRuntime, shelf: Path, slack: int, seed: int
) -> None:
    """After each load, failed load, unload and eviction of a random walk; no load is refused."""
    chance = random.Random(seed)
    capacity = 4 * alone_bytes(shelf, "large-1") + slack
    more = {"capacity_bytes": capacity, "mesh_slack_bytes": slack}
    async with start(**settings(shelf, **more)) as runtime:
        told_of = (await runtime.mesh.status()).capacityInBytes
        seen = []

        def compare(books: MeshBooks) -> None:
            seen.append((books.believed_bytes, runtime.application.capacity.used_bytes))

        choose = any_of(chance) if seed % 2 else first
        books = MeshBooks(runtime.mesh, told_of, paths(shelf), choose, after_each=compare)
        ended: dict[str, set[str]] = {}
        for _ in range(STEPS):
            model = chance.choice(sorted(books.paths))
            if model in books.told:
                await books.evict(model)
            else:
                ended.setdefault(model, set()).add((await books.load(model))[0])

    assert [] == [(believed, used) for believed, used in seen if used > believed + slack]
    assert max(used for _, used in seen) > told_of // 2
    assert {"FAILED_PRECONDITION"} == ended.pop("broken")
    assert {"OK"} == set().union(*ended.values())


async def test_what_models_share_is_told_once_where_there_is_room_for_it(
    start: StartRuntime, shelf: Path
) -> None:
    alone = alone_bytes(shelf, "small-1-1")
    more = {"capacity_bytes": 8 * alone, "mesh_slack_bytes": 3 * alone}
    async with start(**settings(shelf, **more)) as runtime:
        books = MeshBooks(runtime.mesh, 5 * alone, paths(shelf))
        for name in ("small-1-1", "small-1-2", "small-1-3"):
            await books.load(name)
        told = list(books.told.values())
        await books.evict("small-1-1")
        predicted = (await runtime.mesh.predict("small-1-1", books.paths["small-1-1"])).sizeInBytes
        used = runtime.held().booked_bytes

    assert [20, 20] == told[1:]
    assert told[0] + 20 == used
    assert predicted >= told[0]


async def test_a_load_that_nobody_makes_room_for_is_refused_at_once(
    start: StartRuntime, shelf: Path
) -> None:
    """It needs more than predicted, although the mesh believes there is enough memory."""
    large, small = alone_bytes(shelf, "large-1"), alone_bytes(shelf, "small-2-1")
    capacity = large + small // 2
    async with start(**settings(shelf, capacity_bytes=capacity)) as runtime:
        books = MeshBooks(runtime.mesh, capacity, paths(shelf))
        await books.load("small-2-1")
        # With a puller, the files do not exist yet when the mesh asks.
        predicted = (await runtime.mesh.predict("m", "storage/m")).sizeInBytes
        async with asyncio.timeout(MOST_SECONDS):
            ended = await mesh.code(runtime.mesh.load("m", books.paths["large-1"]))
        remembered = (await runtime.mesh.predict("m", "storage/m")).sizeInBytes

    assert predicted < large
    assert "RESOURCE_EXHAUSTED" == ended
    assert remembered > predicted


async def test_a_load_waits_while_the_mesh_counts_more_than_there_is(
    start: StartRuntime, shelf: Path
) -> None:
    """It evicts models whose unload calls have not arrived yet."""
    alone = alone_bytes(shelf, "small-1-1")
    async with start(**settings(shelf, capacity_bytes=2 * alone - 1)) as runtime:
        books = MeshBooks(runtime.mesh, 2 * alone - 1, paths(shelf))
        await books.load("small-1-1")
        path = books.paths["small-2-1"]
        await runtime.mesh.predict("small-2-1", path)
        loading = asyncio.ensure_future(mesh.code(runtime.mesh.load("small-2-1", path)))
        await until(lambda: runtime.application.registry.find("small-2-1") is not None)
        await books.evict("small-1-1")

        assert "OK" == await loading


async def test_models_of_one_computation_that_leave_together_are_never_counted_twice(
    start: StartRuntime, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each passes the cost of shared programs on before its own memory is freed."""
    count = 8
    for number in range(1 + MODELS, 1 + count):
        path = shelf / f"small-1-{number}"
        if not path.exists():
            shutil.copytree(shelf / "small-1-1", path)
    names = [f"small-1-{number}" for number in range(1, 1 + count)]
    alone = alone_bytes(shelf, names[0])
    async with start(**settings(shelf, capacity_bytes=20 * alone)) as runtime:
        capacity, told = runtime.application.capacity, Capacity._tell
        for name in names:
            await runtime.mesh.load(name, shelf / name)
        before = capacity.used_bytes
        seen: list[int] = []
        loop = asyncio.get_running_loop()

        def note(self: Capacity) -> None:
            # After the current step, as other readers of the ledger see it.
            loop.call_soon(lambda: seen.append(self.used_bytes))
            told(self)

        monkeypatch.setattr(Capacity, "_tell", note)
        await asyncio.gather(*map(runtime.mesh.unload, names))
        after = capacity.used_bytes

    assert 0 == after
    assert len(names) <= len(seen)
    assert before >= max(seen)
