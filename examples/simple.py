"""Sum and difference of two integer vectors: the `simple` model of Triton's quick start.

python examples/simple.py models/simple/1
"""

import sys

import jax

from xlaserve import Exportable


def add_and_subtract(params: None, left: jax.Array, right: jax.Array) -> dict[str, jax.Array]:
    """Return both results; a model without parameters receives None for them."""
    return {"OUTPUT0": left + right, "OUTPUT1": left - right}


model = Exportable(
    add_and_subtract,
    None,
    {"INPUT0": ("INT32", [-1, 16]), "INPUT1": ("INT32", [-1, 16])},
    max_batch_size=8,
)

if __name__ == "__main__":
    print(model.write(sys.argv[1]))
