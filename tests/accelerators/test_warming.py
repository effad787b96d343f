"""Filling compilation caches for GPUs and TPUs, for whole and sharded models."""

from pathlib import Path
from typing import Any

import pytest
from support.targets import SHARDED, export_sharded, keys, warm


@pytest.mark.parametrize("count", [2, 4, 8])
def test_sharded_models_compile_for_the_real_topologies(
    platform: Any, tmp_path: Path, count: int
) -> None:
    """Compiler flags of the compiling process are not part of the cache keys: servers lack them."""
    paths = export_sharded(tmp_path / "models", count)
    made = warm(tmp_path / "cache", platform.target.name, count, *paths.values())
    found = keys(tmp_path / "cache")

    assert [""] * len(SHARDED) == [str(one.problem or "") for one in made]
    assert [4] * len(SHARDED) == [len(one.programs) for one in made]
    assert {True} == {key["ahead"] for key in found}
    assert {""} == {key["environment"]["flags"] for key in found}
    spread = ",".join(map(str, range(count)))
    options = {key["environment"]["options"] for key in found if key["program"]["devices"] != "0"}
    assert {"0", spread} == {key["program"]["devices"] for key in found}
    # Where shards are exchanged, and XLA for GPUs can hide the latency.
    hiding = "xla_gpu_enable_latency_hiding_scheduler=True"
    assert {hiding if platform.name == "cuda" else ""} == options
