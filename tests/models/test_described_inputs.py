"""Inputs that an author describes in other ways: what is taken, and what the rest is told."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import xlaserve
from xlaserve.authoring.declared import flattened, input_specs
from xlaserve.errors import InvalidModel
from xlaserve.local.exported import ExportedFunction, exportable
from xlaserve.tensors import TensorSpec, datatype_named

PARAMS = {"w": np.ones((3, 2), np.float32)}
PAIR = "input 'x': expected a datatype and a shape, such as ('FP32', [-1, 784])"
NAMES = "inputs: expected a dict by name, such as {'x': ('FP32', [-1, 784])}"


def predict(params: Any, x: Any) -> Any:
    return {"y": x @ params["w"]}


WRONG: Mapping[str, tuple[Any, str]] = {
    "a class": ({"x": np.float32}, PAIR),
    "a datatype": ({"x": "FP32"}, PAIR),
    "a size": ({"x": ("FP32", 3)}, PAIR),
    "three": ({"x": ("FP32", [-1, 3], 1)}, PAIR),
    "a shape of floats": ({"x": ("FP32", [1.5, 3])}, PAIR),
    "a shape as text": ({"x": ("FP32", "-1,3")}, PAIR),
    "rows": ([("x", "FP32", [-1, 3])], NAMES),
    "names": (["x"], NAMES),
    "a name": ("x", NAMES),
    "a number": (3, NAMES),
    "an unknown datatype": ({"x": ("FP31", [-1, 3])}, "expected one of BOOL, UINT8"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_describes_no_input_is_said_with_what_does(what: str, tmp_path: Path) -> None:
    inputs, told = WRONG[what]
    with pytest.raises(InvalidModel) as raised:
        xlaserve.export_model(predict, PARAMS, inputs, tmp_path / "m" / "1")

    assert told in str(raised.value)


RIGHT: Mapping[str, Any] = {
    "V2": {"x": ("FP32", [-1, 3])},
    "numpy": {"x": (np.float32, (-1, 3))},
    "a text of numpy": {"x": ["float32", [np.int64(2), 3]]},
    "an array": {"x": np.ones((1, 3), np.float32)},
    "a spec of JAX": {"x": jax.ShapeDtypeStruct((1, 3), np.float32)},
    "specs of ours": [TensorSpec("x", datatype_named("FP32"), (-1, 3))],
}


@pytest.mark.parametrize("what", RIGHT)
def test_all_that_says_both_is_taken(what: str) -> None:
    flat, _ = flattened(RIGHT[what])
    (spec,) = input_specs(flat)

    assert ("x", "FP32", 2, 3) == (spec.name, spec.datatype.name, len(spec.shape), spec.shape[1])


@pytest.fixture(scope="module")
def function() -> Iterator[ExportedFunction]:
    made = ExportedFunction(exportable(predict, PARAMS, RIGHT["V2"], None, 1), "m")
    yield made
    made.remove()


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({}, "params lack ['w']"),
        ({"v": PARAMS["w"]}, "params lack ['w'] and also have ['v']"),
        ({"w": PARAMS["w"], "b": PARAMS["w"]}, "params also have ['b']"),
        ([PARAMS["w"]], "params lack ['w'] and also have [0]"),
    ],
)
def test_an_update_with_another_tree_names_what_differs(
    function: ExportedFunction, params: Any, told: str
) -> None:
    with pytest.raises(InvalidModel) as raised:
        function.write(params)

    assert told in str(raised.value)
    assert ["1"] == [path.name for path in (function.repository / "m").iterdir()]
