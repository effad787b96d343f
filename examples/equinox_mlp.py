"""Export an Equinox module: its arrays become the parameters, the rest becomes constants.

python examples/equinox_mlp.py models/equinox/1
xlaserve export examples/equinox_mlp.py:model models/equinox
"""

import sys

import equinox as eqx
import jax

from xlaserve import Exportable


def model() -> Exportable:
    """Return the model. Its arrays are stored; its activation function and sizes are constants."""
    mlp = eqx.nn.MLP(in_size=8, out_size=3, width_size=32, depth=2, key=jax.random.key(0))
    params, static = eqx.partition(eqx.nn.inference_mode(mlp), eqx.is_array)

    def predict(params: eqx.nn.MLP, features: jax.Array) -> jax.Array:
        return jax.vmap(eqx.combine(params, static))(features)

    return Exportable(predict, params, {"features": ("FP32", [-1, 8])}, outputs=["scores"])


if __name__ == "__main__":
    print(model().write(sys.argv[1]))
