"""Placement of requests on replicas."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.virtual_devices import run_on_devices

import xlaserve
from xlaserve.serving.stations.replicas import Replicas

SCRIPT = Path(__file__).parents[2] / "on_devices.py"
ROUNDS = 3


def test_the_replica_with_the_fewest_is_next() -> None:
    replicas = Replicas(3)
    first = [replicas.take() for _ in range(4)]
    replicas.leave(1)
    replicas.leave(2)

    assert [0, 1, 2, 0] == first
    assert [1, 2, 1] == [replicas.take() for _ in range(3)]


@pytest.mark.slow  # each value starts a process with this many devices
@pytest.mark.parametrize("count", [4])
def test_a_model_without_batches_uses_all_of_its_devices(tmp_path: Path, count: int) -> None:
    """In a subprocess with `count` devices, as many requests run at once, one per device."""
    xlaserve.export_model(
        lambda p, x: {"y": x + p["b"]},
        {"b": np.ones((1, 4), np.float32)},
        {"x": ("FP32", [1, 4])},
        tmp_path / "models" / "m" / "1",
    )
    config = {"parameters": {"devices": {"string_value": "all"}}}
    (tmp_path / "models" / "m" / "config.json").write_text(json.dumps(config))
    printed = run_on_devices(SCRIPT, tmp_path / "models", count)

    used = json.loads(printed.splitlines()[-1])
    assert {f"cpu:{index}": ROUNDS for index in range(count)} == used
