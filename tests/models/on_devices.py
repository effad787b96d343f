"""Loads a model in several placements, and prints the results as JSON.

Runs as a separate process: JAX fixes the number of CPU devices when it starts.
"""

import json
import sys
from pathlib import Path
from typing import TypedDict

import jax.monitoring
import numpy as np
from support.plain_models import load_plain

from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.message import config_of
from xlaserve.runtime.devices import jax_runtime, sites
from xlaserve.runtime.exported.jax_export import JaxExportModel
from xlaserve.runtime.exported.outputs import DeviceTensor
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaders import predict_size
from xlaserve_proto import inference

RULES = json.dumps({"w1": [None, "model"], "w2": ["model", None]})
PLACEMENTS: dict[str, dict[str, str]] = {
    "one": {},
    "replicas": {"devices": "all"},
    "pairs": {"devices": "0,2"},
    "shard": {"devices": "all", "placement": "shard", "partition": RULES},
    "mesh": {
        "devices": "all",
        "placement": "shard",
        "partition": RULES,
        "mesh": f"data=2,model={int(sys.argv[2]) // 2}",
    },
}


class Seen(TypedDict):
    """The results of a placement."""

    compilations: int
    parameters_bytes: int
    total_bytes: int
    per_device: dict[str, int]
    predicted: dict[str, int]
    output_devices: list[list[int]]
    parameter_devices: list[list[int]]
    worst: float


def look(directory: Path, name: str, compiled: list[str]) -> Seen:
    """Load in one placement, execute 1, 3 and 4 rows on each replica, and close the model."""
    compiled.clear()
    model = load_plain(directory, LoadContext("m", "1", _config(name)))
    count, memory = len(compiled), model.info.memory
    expected = np.load(directory.parent / "expected.npy")
    rows = np.load(directory.parent / "x.npy")
    worst, places = 0.0, list[list[int]]()
    for replica in range(model.replicas):
        here: list[int] = []
        for size in (1, 3, 4):
            output = model.execute({"x": rows[:size]}, resident=True, replica=replica)["y"]
            assert isinstance(output, DeviceTensor)
            here = sorted(device.id for device in output.array.devices())
            worst = max(worst, float(np.abs(output.numpy() - expected[:size]).max()))
        places.append(here)
    seen = Seen(
        compilations=count,
        parameters_bytes=memory.parameters_bytes,
        total_bytes=memory.total_bytes,
        per_device=dict(memory.per_device),
        predicted=predict_size(directory, _config(name), sites.devices("cpu")),
        output_devices=places,
        parameter_devices=_parameter_devices(model),
        worst=worst,
    )
    assert len(compiled) == count, "an execution compiled"
    model.close()
    return seen


def _parameter_devices(model: JaxExportModel) -> list[list[int]]:
    return [
        sorted(device.id for device in leaf.devices())
        for copy in model._copies
        for leaf in copy.leaves
    ]


def _config(name: str) -> ModelConfig:
    message = inference.ModelConfig(
        parameters={
            key: inference.ModelParameter(string_value=value)
            for key, value in PLACEMENTS[name].items()
        }
    )
    if name == "pairs":
        message.instance_group = [inference.ModelInstanceGroup(count=2)]
    return config_of(message)


def main(directory: Path) -> None:
    """Print the results of each placement by name."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax_runtime.start("cpu")
    jax.monitoring.register_event_duration_secs_listener(listen)
    print(json.dumps({name: look(directory, name, compiled) for name in PLACEMENTS}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
