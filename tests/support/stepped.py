"""A stepped model that counts, with a sum and a random key in its state."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve import export_stream

INPUTS = {"start": ("INT32", [1]), "count": ("INT32", [1])}


def begin(params: Any, start: jax.Array, count: jax.Array) -> Any:
    """Return an initial state with every kind of pytree leaf, including a key and a scalar."""
    return {
        "next": start,
        "sums": (jnp.zeros(2, jnp.float32),),
        "key": jax.random.key(7),
        "left": count[0],
    }


def step(params: Any, state: Any, start: jax.Array, count: jax.Array) -> Any:
    """Return the number, the scaled sum of all numbers so far, and a random number."""
    key, use = jax.random.split(state["key"])
    sums = state["sums"][0] + state["next"].astype(jnp.float32) * params["scale"]
    left = state["left"] - 1
    following = {"next": state["next"] + 1, "sums": (sums,), "key": key, "left": left}
    outputs = {
        "number": state["next"],
        "sums": sums,
        "random": jax.random.uniform(use, (1,), jnp.float32),
    }
    return following, outputs, left <= 0


PARAMS = {"scale": np.array([1, 2], np.float32)}


def export_counter(path: Path, **fields: Any) -> Path:
    """Export the counter; `fields` override those of ExportableStream."""
    given: dict[str, Any] = {"params": PARAMS, "inputs": INPUTS, "begin": begin}
    given |= fields
    return export_stream(given.pop("step", step), path=path, **given)
