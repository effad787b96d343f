"""Opens every device kind of a platform with every count, and shards a program over it.

Runs as a separate process, in the environment for compiling. Prints JSON.
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlaserve.offline.targets.topology import open_devices
from xlaserve.runtime.devices import jax_runtime
from xlaserve.runtime.devices.target_kinds import TARGETS, Target


def arguments_bytes(target: Target, count: int) -> int:
    """Return the argument bytes per device of a sharded product."""
    mesh = Mesh(np.array(open_devices(target, count)), ("model",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, "model"), ()))
    matrix = jax.ShapeDtypeStruct((512, 1024), np.float32, sharding=split)
    rows = jax.ShapeDtypeStruct((8, 512), np.float32, sharding=whole)
    function = jax.jit(lambda w, x: x @ w @ w.T, out_shardings=whole)
    analysis = function.lower(matrix, rows).compile().memory_analysis()
    assert analysis is not None
    return int(analysis.argument_size_in_bytes)


def main(platform: str) -> None:
    """Print the properties of each device kind of a platform, and its argument bytes."""
    jax_runtime.start("cpu")
    found = {
        name: {
            "kind": str(open_devices(row)[0].device_kind),
            "arguments": {count: arguments_bytes(row, count) for count in row.counts},
        }
        for name, row in TARGETS.items()
        if row.platform == platform
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
