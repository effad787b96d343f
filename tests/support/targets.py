"""Models for several devices, and which targets this environment has the wheels for."""

import json
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from xlaserve.errors import DeviceUnavailable
from xlaserve.models.export import export_model
from xlaserve.models.targets import kinds, wheels

_RULES = json.dumps({"w1": [None, "model"], "w2": ["model", None]})
_SPREAD = {"devices": "all", "placement": "shard", "partition": _RULES}

SHARDED: Mapping[str, Mapping[str, str]] = {
    "whole": {},
    "sharded": _SPREAD,
    "meshed": {**_SPREAD, "mesh": "data=2,model={half}"},
}
"""The parameters of configurations, by model."""


def needs_wheels(target: str) -> pytest.MarkDecorator:
    """Skip where nothing is installed that compiles for a target."""
    try:
        wheels.check(kinds.named(target))
    except DeviceUnavailable as error:
        return pytest.mark.skip(reason=str(error))
    return pytest.mark.filterwarnings("default")


def export_sharded(root: Path, count: int) -> dict[str, Path]:
    """Export a perceptron for so many devices, in each placement, with three batch sizes and 4."""
    random = np.random.default_rng(0)
    params = {
        "w1": random.standard_normal((64, 128)).astype(np.float32),
        "w2": random.standard_normal((128, 64)).astype(np.float32),
        "b": random.standard_normal(64).astype(np.float32),
    }
    paths = {}
    for name, parameters in SHARDED.items():
        paths[name] = export_model(
            lambda p, x: {"y": jnp.maximum(x @ p["w1"], np.float32(0)) @ p["w2"] + p["b"][None, :]},
            params,
            {"x": ("FP32", [-1, 64])},
            root / name / "1",
            max_batch_size=4,
            platforms=("cpu", "cuda", "tpu"),
        )
        said = {
            key: {"string_value": text.replace("{half}", str(count // 2))}
            for key, text in parameters.items()
        }
        (root / name / "config.json").write_text(json.dumps({"parameters": said}))
    return paths
