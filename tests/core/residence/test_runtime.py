"""The model memory reported to a mesh."""

from pathlib import Path
from typing import Any

import pytest

from xlaserve.residence.platforms.runtime import RuntimeLimits
from xlaserve.settings import Settings

GIB, MIB = 1 << 30, 1 << 20

TOLD: dict[str, tuple[dict[str, Any], int, int]] = {
    "5 %": ({"default_model_size_bytes": 1}, 0, GIB - GIB // 20),
    "the default": ({"default_model_size_bytes": 60 * MIB, "load_threads": 2}, 0, GIB - 120 * MIB),
    "the largest": ({"load_threads": 3}, 70 * MIB, GIB - 210 * MIB),
    "a quarter": ({"load_threads": 3}, 500 * MIB, GIB - GIB // 4),
    "what a mesh demands": ({"default_model_size_bytes": 500 * MIB}, 0, 1000 * MIB),
    "as set": ({"mesh_slack_bytes": 7}, 500 * MIB, GIB - 7),
    "none": ({"mesh_slack_bytes": 0}, 500 * MIB, GIB),
}
"""Case -> settings, largest model seen so far, and the bytes reported to a mesh out of 1 GiB."""


@pytest.mark.parametrize("why", TOLD)
def test_a_mesh_is_not_told_of_the_slack(why: str) -> None:
    settings, largest, told = TOLD[why]
    limits = RuntimeLimits.of(Settings(repository=Path(), **settings), GIB, largest)

    assert told == limits.capacity_bytes
