"""Models for several devices, and compilation caches for devices that are not attached."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from xlaserve.authoring.export import export_model
from xlaserve.offline.targets.compiling import Compilers
from xlaserve.offline.targets.jobs import Compiled, Job
from xlaserve.offline.targets.warming_plan import WarmingPlan

_RULES = json.dumps({"w1": [None, "model"], "w2": ["model", None]})
_SPREAD = {"devices": "all", "placement": "shard", "partition": _RULES}

SHARDED: Mapping[str, Mapping[str, str]] = {
    "whole": {},
    "sharded": _SPREAD,
    "meshed": {**_SPREAD, "mesh": "data=2,model={half}"},
}
"""Parameters of the configurations, by model."""


def warm(cache: Path, target: str, count: int, *paths: Path, flags: str = "") -> list[Compiled]:
    """Fill a cache like `xlaserve warm`."""
    plan = WarmingPlan(str(cache), 1 << 30, flags)
    jobs = [
        Job(
            path.parent.name, str(path), target, count, str(path.parent), flags=tuple(flags.split())
        )
        for path in paths
    ]
    with Compilers(most=1, command=plan.command) as compilers:
        return compilers.compile(jobs)


def keys(cache: Path) -> list[dict[str, Any]]:
    """Return the keys in a cache."""
    return [json.loads(path.read_text()) for path in cache.glob("*/*.json")]


def export_sharded(root: Path, count: int) -> dict[str, Path]:
    """Export a perceptron for `count` devices in each placement, with three batch sizes."""
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
