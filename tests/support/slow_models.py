"""A slow model that multiplies each row again and again, independently of the others."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve import export_model

WIDTH = 128


def export_slow(root: Path, name: str, loops: int, *, add: float = 1.0, version: int = 1) -> Path:
    """Export a version that adds a number to its input after `loops` matrix products.

    A thousand loops take some tens of milliseconds.
    """

    def slow(params: Any, x: jax.Array) -> jax.Array:
        # The matrix is a permutation, so the products change nothing, but XLA cannot know.
        turned = jax.lax.fori_loop(0, loops, lambda _, v: jnp.tanh(v @ params["w"]), x)
        answer: jax.Array = x + params["add"] + 0 * turned
        return answer

    eye = np.roll(np.eye(WIDTH, dtype=np.float32), 1, axis=1)
    params = {"w": eye, "add": np.full((1, WIDTH), add, np.float32)}
    return export_model(
        slow,
        params,
        {"x": ("FP32", [-1, WIDTH])},
        root / name / str(version),
        outputs=["y"],
        max_batch_size=4,
        overwrite=True,
    )


def rows(value: float, count: int = 1) -> dict[str, Any]:
    """Return a REST request with `count` rows of a value."""
    data = [value] * (count * WIDTH)
    tensor = {"name": "x", "datatype": "FP32", "shape": [count, WIDTH], "data": data}
    return {"inputs": [tensor]}
