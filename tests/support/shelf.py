"""Small JAX models for a mesh to load, exported once."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import xlaserve
from support.mesh import message

MIB = 1 << 20

ECHO_BYTES = 16 * MIB
ECHO_ANSWER_BYTES = 16 * MIB - 1024
"""Answer size of `echo`; with its framing, just below the mesh's limit."""
LARGE_BYTES = 128 * MIB
"""Size of the parameters of `large`."""
SPINS_PER_SECOND = 7 * 10**7
"""Approximate iterations per second of `spin`; fewer on slow machines."""

SLOW_ROWS = 256
"""max_batch_size of `slow`: 16 executables that take a second or more to compile."""

_LAYERS = 8


@dataclass(frozen=True, slots=True)
class Shelf:
    """A directory of models; treat it as read-only."""

    root: Path

    def path(self, name: str) -> Path:
        """Return the path of a model."""
        return self.root / name


def add(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """Add a parameter that identifies the model."""
    return x + params["v"]


def add_all(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """Add both parameters."""
    return add(params, x) + params["w"].sum()


def spin(params: Mapping[str, jax.Array], n: jax.Array) -> jax.Array:
    """Loop for as many iterations as the request says."""

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        count, value = carry
        return count + 1, jnp.sin(value) + params["v"]

    start = jnp.int32(0), jnp.zeros(1, jnp.float32)
    return jax.lax.while_loop(lambda carry: carry[0] < n[0], step, start)[1]


def deep(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """Run a function that takes long to compile."""
    for _ in range(_LAYERS):
        x = jnp.tanh(x @ params["w"]) + jnp.sort(x, axis=1)
    return x


def echo(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """Return nearly all of the input."""
    return x[:ECHO_ANSWER_BYTES]


def large(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """Use large parameters."""
    return x + params["w"].sum()


def fill(root: Path) -> None:
    """Export every model into an empty directory."""
    for value in (1, 2, 3):
        export_adder(root / f"plus-{value}" / "1", value)
    for value in (1, 2, 10):
        export_adder(root / "versioned" / str(value), value)
    _export(spin, {"v": np.ones(1, np.float32)}, {"n": ("INT32", [1])}, root / "spin/1")
    weights = {"w": np.full((8, 8), 0.1, np.float32)}
    _export(deep, weights, {"x": ("FP32", [-1, 8])}, root / "slow/1", max_batch_size=SLOW_ROWS)
    _export(echo, {"v": np.ones(1)}, {"x": ("UINT8", [ECHO_BYTES])}, root / "echo/1")
    ones = {"w": np.ones(LARGE_BYTES // 4, np.float32)}
    _export(large, ones, {"x": ("FP32", [2])}, root / "large/1")
    _add_configured(root)
    _add_single_file(root)
    _add_broken(root)


def export_adder(path: Path, value: float, *, bytes_besides: int = 0, computation: int = 0) -> Path:
    """Export x FP32[2] -> y = x + value, optionally with parameters that add nothing.

    Models with different `computation` share no program.
    """
    params = {"v": np.full(1, value, np.float32)}
    if bytes_besides:
        params["w"] = np.zeros(bytes_besides // 4, np.float32)
    adds = add_all if bytes_besides else add

    def function(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
        there = np.float32(computation)
        return adds(params, x + there - there) if computation else adds(params, x)

    return _export(function, params, {"x": ("FP32", [2])}, path)


def _export(fn: Any, params: object, inputs: Any, path: Path, max_batch_size: int = 0) -> Path:
    return xlaserve.export_model(
        fn,
        params,
        inputs,
        path,
        outputs=["y"],
        max_batch_size=max_batch_size,
        platforms=(jax.default_backend(),),
    )


def _add_configured(root: Path) -> None:
    """Add a model whose configuration names another model, and schema files for it."""
    export_adder(root / "configured/1", 4)
    tensor = {"data_type": "TYPE_FP32", "dims": [2]}
    config = {
        "name": "another",
        "max_batch_size": 0,
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
        "parameters": {"max_concurrency": {"string_value": "7"}},
    }
    (root / "configured/config.json").write_text(json.dumps(config))
    for name, datatype in (("schema", "FP32"), ("wrong-schema", "INT8")):
        tensors = {
            kind: [{"name": tensor, "datatype": datatype, "shape": [2]}]
            for kind, tensor in (("inputs", "x"), ("outputs", "y"))
        }
        (root / f"{name}.json").write_text(json.dumps(tensors))


def _add_single_file(root: Path) -> None:
    argument = {"x": jax.ShapeDtypeStruct((2,), jnp.float32)}
    exported = jax.export.export(jax.jit(lambda inputs: {"y": inputs["x"] + 5}))(argument)
    (root / "single.jaxexp").write_bytes(exported.serialize())


def _add_broken(root: Path) -> None:
    """Add models that fail to load, each for a different reason."""
    directory = export_adder(root / "corrupt/1", 6)
    for file in directory.glob("*.jaxexp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 0xFF
        file.write_bytes(data)
    (root / "empty").mkdir()
    (root / "junk.jaxexp").write_bytes(b"no artifact" * 100)


def addition(*x: float, name: str = "", **more: Any) -> Any:
    """Return a request for one of the adders."""
    return _request(name, "x", "FP32", np.array(x or (0, 0), np.float32), **more)


def sums(response: Any) -> list[float]:
    """Return an adder's output."""
    values: list[float] = np.frombuffer(response.raw_output_contents[0], np.float32).tolist()
    return values


def spinning(seconds: float) -> Any:
    """Return a request for `spin` that takes about this long."""
    return _request("", "n", "INT32", np.array([SPINS_PER_SECOND * seconds], np.int32))


def deep_rows(rows: int = 1) -> Any:
    """Return a request for `slow`."""
    return _request("", "x", "FP32", np.zeros((rows, 8), np.float32))


def octets(count: int) -> Any:
    """Return a request for `echo`, which expects ECHO_BYTES."""
    return _request("", "x", "UINT8", np.zeros(count, np.uint8))


def _request(model: str, name: str, datatype: str, data: Any, **more: Any) -> Any:
    request = message(
        "inference.ModelInferRequest",
        model_name=model,
        raw_input_contents=[data.tobytes()],
        **more,
    )
    shape: Sequence[int] = data.shape
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    return request
