"""A stepped model, exported: it counts, and keeps a sum and random numbers in its state."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve import export_stream

INPUTS = {"start": ("INT32", [1]), "count": ("INT32", [1])}


def begin(params: Any, start: jax.Array, count: jax.Array) -> Any:
    """Return a state with all that a pytree may have: a key too, and an array that was no array."""
    return {
        "next": start,
        "sums": (jnp.zeros(2, jnp.float32),),
        "key": jax.random.key(7),
        "left": count[0],
    }


def step(params: Any, state: Any, start: jax.Array, count: jax.Array) -> Any:
    """Answer the number, the sum of all so far times a parameter, and a random number."""
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
    """Write it as a version directory; `fields` of ExportableStream that differ."""
    given: dict[str, Any] = {"params": PARAMS, "inputs": INPUTS, "begin": begin}
    given |= fields
    return export_stream(given.pop("step", step), path=path, **given)
