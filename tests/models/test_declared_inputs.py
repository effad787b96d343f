"""Inputs as authors write them: names of V2, dtypes, arrays, specs of JAX, and trees of these."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlaserve
from xlaserve.errors import InvalidModel

Spec: Any = jax.ShapeDtypeStruct
OPEN, OPEN_TOO = jax.export.symbolic_shape("n, k")

WRITTEN: Mapping[str, tuple[Any, tuple[str, list[int | str]]]] = {
    "a name of V2": (("FP32", [-1, 3]), ("FP32", [-1, 3])),
    "a name of numpy": (("float32", [-1, 3]), ("FP32", [-1, 3])),
    "a type of numpy": ((np.int8, [1, 3]), ("INT8", [1, 3])),
    "a type of JAX": ((jnp.bfloat16, [-1, 3]), ("BF16", [-1, 3])),
    "a dtype": ((np.dtype(np.bool_), (2, 3)), ("BOOL", [2, 3])),
    "an array": (np.zeros((1, 3), np.uint16), ("UINT16", [1, 3])),
    "an array of JAX": (lambda: jnp.zeros((1, 3), jnp.int32), ("INT32", [1, 3])),
    "a spec": (Spec((2, 3), np.float16), ("FP16", [2, 3])),
    "a spec with a batch": (Spec((OPEN, 3), np.float32), ("FP32", [-1, 3])),
    "a spec with more": (Spec((OPEN, OPEN_TOO), np.float32), ("FP32", [-1, -1])),
}


@pytest.mark.parametrize("written", WRITTEN)
def test_each_way_to_write_an_input(tmp_path: Path, written: str) -> None:
    said, (datatype, shape) = WRITTEN[written]
    # An array of JAX is made here: on import it would start XLA, with its threads.
    said = said() if callable(said) else said
    path = xlaserve.export_model(
        lambda params, x: x, None, {"x": said}, tmp_path / "m" / "1", outputs=["y"]
    )
    (found,) = json.loads((path / "model.json").read_text())["inputs"]

    assert ("x", datatype, shape) == (found["name"], found["datatype"], found["shape"])


def test_specs_within_a_tree(tmp_path: Path) -> None:
    said = {"left": Spec((2, 3), np.float32), "right": ("int32", [3])}
    path = xlaserve.export_model(
        lambda params, x: x["left"] + x["right"].astype(jnp.float32)[None],
        *(None, {"x": said}, tmp_path / "m" / "1"),
        outputs=["y"],
    )
    found = json.loads((path / "model.json").read_text())["inputs"]

    assert [("x.left", "FP32"), ("x.right", "INT32")] == [
        (one["name"], one["datatype"]) for one in found
    ]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("float32", "input 'x': expected a datatype and a shape, such as ('FP32', [-1, 784])"),
        (("FP32",), "or a jax.ShapeDtypeStruct, got ('FP32',)"),
        (3, "or a jax.ShapeDtypeStruct, got 3"),
        (("FP33", [1]), "input 'x': unknown datatype 'FP33', expected one of BOOL"),
        *(
            (
                (narrow, [1]),
                f"input 'x' has dtype {narrow}, which the V2 protocol does not have: make it"
                f" {wide}, and cast",
            )
            for narrow, wide in (
                ("float8_e4m3fn", "FP16 or FP32"),
                ("float8_e8m0fnu", "FP32"),
                ("float4_e2m1fn", "FP16 or FP32"),
                ("int4", "INT8 or UINT8"),
            )
        ),
    ],
)
def test_what_describes_no_input(tmp_path: Path, said: Any, text: str) -> None:
    with pytest.raises(InvalidModel) as raised:
        xlaserve.export_model(lambda params, x: x, None, {"x": said}, tmp_path / "m" / "1")

    assert text in str(raised.value)
    assert not (tmp_path / "m").exists()
