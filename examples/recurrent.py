"""Export a recurrent JAX function: the server keeps the state of each sequence on the device.

python examples/recurrent.py models/smooth/1
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from xlaserve import Exportable

CONFIG = """
max_batch_size: 16
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 10000 }
  control_input [ {
    name: "START"
    control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ]
  } ]
  state [ { input_name: "level" output_name: "level_next" data_type: TYPE_FP32 dims: [ 1 ] } ]
}
"""


def smooth(
    params: dict[str, jax.Array], x: jax.Array, start: jax.Array, level: jax.Array
) -> dict[str, jax.Array]:
    """Smooth a series exponentially, starting with its first value."""
    following = jnp.where(start == 1, x, params["keep"] * level + (1 - params["keep"]) * x)
    return {"y": following, "level_next": following}


def model() -> Exportable:
    """Return the model; `sequence_batching` marks one input as a control and one as the state."""
    inputs = {"x": ("FP32", [-1, 1]), "START": ("INT32", [-1, 1]), "level": ("FP32", [-1, 1])}
    return Exportable(smooth, {"keep": jnp.array(0.9)}, inputs, max_batch_size=16)


if __name__ == "__main__":
    written = model().write(sys.argv[1])
    (Path(sys.argv[1]).parent / "config.pbtxt").write_text(CONFIG)
    print(written)
