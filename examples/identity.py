"""The smallest model: it returns its input.

python examples/identity.py models/identity/1
"""

import sys

import jax

from xlaserve import Exportable


def identity(params: None, x: jax.Array) -> jax.Array:
    """Return the input."""
    return x


model = Exportable(identity, None, {"x": ("FP32", [-1, 16])}, outputs=["y"], max_batch_size=64)

if __name__ == "__main__":
    print(model.write(sys.argv[1]))
