"""Models whose rows affect one another, written as model authors would.

All map `x` FP32[-1,4] to `y`, except one ONNX model whose first dimension is time.
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve import export_model

Function = Callable[[Any, jax.Array], jax.Array]

COLUMNS = 4
WEIGHTS = np.linspace(-1, 1, COLUMNS * COLUMNS, dtype=np.float32).reshape(COLUMNS, COLUMNS)


def by_the_largest(params: Any, x: jax.Array) -> jax.Array:
    return x / jnp.abs(x).max()


def place(params: Any, x: jax.Array) -> jax.Array:
    return x + jnp.arange(x.shape[0], dtype=x.dtype)[:, None]


def running_sum(params: Any, x: jax.Array) -> jax.Array:
    return jnp.cumsum(x, 0)


def quantised(params: Any, x: jax.Array) -> jax.Array:
    scale = jnp.abs(x).max() / 127
    return jnp.matmul(jnp.round(x / scale) * scale, params["w"])


def noise(params: Any, x: jax.Array) -> jax.Array:
    return x + jax.random.normal(jax.random.key(0), x.shape, x.dtype)


def scanned(params: Any, x: jax.Array) -> jax.Array:
    _, y = jax.lax.scan(lambda state, row: (state * 0.5 + row, state + row), x[0] * 0, x)
    return y


def capacity(params: Any, x: jax.Array) -> jax.Array:
    """Admit at most two rows of a batch to an expert, as a mixture of experts does."""
    gate = x @ params["w"][:, :1]
    taken = (gate > 0) & (jnp.cumsum(gate > 0, axis=0) <= 2)
    return jnp.where(taken, x @ params["w"], x)


FUNCTIONS: Mapping[str, Function] = {
    "by_the_largest": by_the_largest,
    "place": place,
    "running_sum": running_sum,
    "quantised": quantised,
    "noise": noise,
    "scanned": scanned,
    "capacity": capacity,
}

IMPORTS = ("quantised_onnx", "time_first_onnx")

NAMES = (*FUNCTIONS, *IMPORTS)


def export(name: str, repository: Path, **fields: Any) -> Path:
    """Write a version directory with `xlaserve export` or `xlaserve import`."""
    if name in FUNCTIONS:
        inputs = {"x": ("FP32", [-1, COLUMNS])}
        path = repository / name / "1"
        params = {"w": WEIGHTS}
        return export_model(FUNCTIONS[name], params, inputs, path, outputs=["y"], **fields)
    from support import mixing_onnx
    from xlaserve.importers.onnx.importing import import_model

    made = mixing_onnx.quantised() if name == "quantised_onnx" else mixing_onnx.time_first()
    source = repository.parent / f"{name}.onnx"
    source.write_bytes(made.SerializeToString())
    return import_model(source, repository / name).path


def row(name: str, number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return an input of one row that is unique to this number."""
    random = np.random.default_rng(number)
    shape = (1, 1, COLUMNS) if name == "time_first_onnx" else (1, COLUMNS)
    return random.standard_normal(shape).astype(np.float32) * (number + 1)


def make_old(version: Path, max_batch_size: int = 64) -> None:
    """Rewrite a manifest in the form written before exports had row proofs."""
    document = json.loads((version / "model.json").read_text())
    document.pop("verdict", None)
    document.pop("batch_independent", None)
    document |= {"format_version": 2, "max_batch_size": max_batch_size}
    (version / "model.json").write_text(json.dumps(document))
