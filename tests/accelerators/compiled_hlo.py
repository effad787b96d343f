"""Compiles models for a target, and prints what their programs exchange with the host, as JSON.

Runs as a separate process, with the environment for compiling for that target.
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from support.hlo import donates, host_traffic

from xlaserve.model_config.text import read_config
from xlaserve.offline.targets.ahead import Ahead
from xlaserve.offline.targets.topology import open_devices
from xlaserve.runtime.devices import jax_runtime
from xlaserve.runtime.devices import target_kinds as kinds
from xlaserve.runtime.programs.compilation import XlaOptions

_COLLECTIVES = re.compile(r"\b(all-reduce|all-gather|reduce-scatter|all-to-all)(-start)?\(")


def control(platform: str, device: Any) -> str:
    """Return the HLO of a function that calls the host, or leaves its result in host memory."""
    place = SingleDeviceSharding(device)
    argument = jax.ShapeDtypeStruct((256, 256), np.float32, sharding=place)
    if platform == "tpu":
        host = SingleDeviceSharding(device, memory_kind="pinned_host")
        function = jax.jit(lambda x: jnp.tanh(x) @ x, out_shardings=host)
    else:
        # As a callback of JAX becomes, which itself asks for a GPU that is there. GPUs that are not
        # there have no memory of a host.
        result = jax.ShapeDtypeStruct(argument.shape, argument.dtype)
        call = jax.ffi.ffi_call("xla_ffi_python_gpu_callback", result, has_side_effect=True)
        function = jax.jit(lambda x: call(x, index=np.uint64(0)))
    return function.lower(argument).compile().as_text() or ""


def main(name: str, count: int, paths: list[Path]) -> dict[str, Any]:
    """Return the findings for a control function, and for every program of the models."""
    jax_runtime.start("cpu")
    target = kinds.named(name)
    devices = open_devices(target, count)
    found: list[dict[str, Any]] = []
    for path in paths:
        config = read_config(path.parent)
        model = Ahead.read(path, config, target.platform, devices)
        for place in model.work():
            spread = len(place[0].site.devices)
            options = XlaOptions().for_site(target.platform, spread)
            executable = model.lowered(place).compile(compiler_options=options or None)
            text = executable.as_text() or ""
            found.append(
                {
                    "model": path.parent.name,
                    "rows": place[1],
                    "devices": spread,
                    "characters": len(text),
                    "traffic": host_traffic(text),
                    "donates": donates(text),
                    "collectives": len(_COLLECTIVES.findall(text)),
                }
            )
    return {"control": host_traffic(control(target.platform, devices[0])), "programs": found}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), [Path(path) for path in sys.argv[3:]])))
