"""Export a plain JAX function: any jitted function of parameters and inputs is a model.

python examples/plain_jax.py models/plain/1
xlaserve export examples/plain_jax.py:model models/plain
"""

import sys

import jax
import jax.numpy as jnp

from xlaserve import Exportable


@jax.jit
def forecast(
    params: dict[str, jax.Array], history: jax.Array, weekday: jax.Array
) -> dict[str, jax.Array]:
    """Forecast the next value and its spread from 28 past ones and the day of the week."""
    level = history @ params["weights"] + params["by_weekday"][weekday]
    spread = jnp.std(history, axis=1) * jnp.exp(params["log_scale"])
    return {"value": level, "spread": spread}


def model() -> Exportable:
    """Return the model; the inputs are passed to the function in the order given here."""
    params = {
        "weights": jnp.full(28, 1 / 28),
        "by_weekday": 0.1 * jax.random.normal(jax.random.key(0), (7,)),
        "log_scale": jnp.array(-0.5),
    }
    inputs = {"history": ("FP32", [-1, 28]), "weekday": ("INT32", [-1])}
    return Exportable(forecast, params, inputs, outputs=["value", "spread"], max_batch_size=32)


if __name__ == "__main__":
    print(model().write(sys.argv[1]))
