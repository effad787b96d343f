"""Model parameters are in memory once, however many processes serve the model."""

from pathlib import Path

import numpy as np
import pytest
from support import several

from xlaserve.artifact.manifest import WEIGHTS
from xlaserve.authoring.export import export_model

WIDTH = 512
SIZE_BYTES = 4 * WIDTH * WIDTH


def _pages(pid: int) -> dict[str, int]:
    """Return the kernel's figures for the mapped parameters of a process, in bytes."""
    found: dict[str, int] = {}
    is_ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if " " in name:
            is_ours = line.endswith(WEIGHTS)
        elif is_ours and value.endswith("kB"):
            found[name] = found.get(name, 0) + int(value.split()[0]) * 1024
    return found


@pytest.mark.slow
async def test_workers_have_the_pages_of_parameters_between_them(tmp_path: Path) -> None:
    """Each worker accounts for its share, so that the sum equals the memory in use."""
    models = several.repository(tmp_path / "models")
    export_model(
        lambda params, x: x @ params["w"],
        {"w": np.eye(WIDTH, dtype=np.float32)},
        {"x": ("FP32", [-1, WIDTH])},
        models / "wide" / "1",
        outputs=["y"],
        max_batch_size=2,
    )
    async with several.several(models) as server:
        found = [_pages(pid) for pid in several.workers(server).values()]
        loads = [one for one in server.log if one.get("event") == "model loaded"]

    assert [0, 0] == [one["Private_Clean"] + one["Private_Dirty"] for one in found]
    # The kernel divides each page by its number of users; the file header takes one more page.
    assert [SIZE_BYTES // 2] * 2 == [one["Pss"] // 4096 * 4096 for one in found]
    booked = [one["size_bytes"] for one in loads if one["model"] == "wide"]
    assert 2 == len(booked)
    assert all(SIZE_BYTES // 2 <= size for size in booked)
    assert all(size < SIZE_BYTES // 2 + 2**21 for size in booked)
