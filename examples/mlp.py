"""A perceptron with the size for MNIST and random weights, for benchmarks.

python examples/mlp.py models/mlp/1
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve import Exportable

SEED = 7


def parameters() -> dict[str, np.ndarray]:
    """Return the weights of 784-512-10, always the same."""
    random = np.random.RandomState(SEED)
    shapes = {"w1": (784, 512), "b1": (512,), "w2": (512, 10), "b2": (10,)}
    return {
        name: (random.standard_normal(shape) * 0.05).astype(np.float32)
        for name, shape in shapes.items()
    }


def predict(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Return ten scores for each row."""
    hidden = jnp.maximum(x @ params["w1"] + params["b1"], 0)
    return hidden @ params["w2"] + params["b2"]


def model() -> Exportable:
    """Return the model, ready to be exported."""
    return Exportable(
        predict, parameters(), {"x": ("FP32", [-1, 784])}, outputs=["y"], max_batch_size=64
    )


if __name__ == "__main__":
    print(model().write(sys.argv[1]))
