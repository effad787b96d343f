"""Nested inputs and outputs of an export, named by the paths of their leaves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xlaserve.artifact import manifest
from xlaserve.artifact.trees import flatten_inputs, flatten_outputs
from xlaserve.authoring.export import Exportable
from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.tensors import Tensor

Load = Callable[..., LoadedModel]
Run = Callable[..., dict[str, Tensor]]
ROW = ("FP32", [-1])


def _combined(params: Any, pair: Any, more: Any) -> Any:
    left, right = pair
    return {"sum": {"all": left + right["a"] * 10 + more["b"] * 100}, "each": [left, right["a"]]}


def test_arguments_and_results_may_be_trees(tmp_path: Path, load: Load, run: Run) -> None:
    inputs = {"pair": [ROW, {"a": ROW}], "more": {"b": ROW}}
    path = Exportable(_combined, None, inputs, max_batch_size=2).write(tmp_path / "m" / "1")
    described = manifest.read(path)
    values = {name: np.full(2, n, np.float32) for n, name in enumerate(("pair.0", "pair.1.a"), 1)}
    found = run(load(path, ModelConfig()), {**values, "more.b": np.full(2, 3, np.float32)})

    assert ["pair.0", "pair.1.a", "more.b"] == [spec.name for spec in described.inputs]
    assert {"sum.all": [321, 321], "each.0": [1, 1], "each.1": [2, 2]} == {
        name: value.tolist() for name, value in found.items()
    }


def test_names_of_outputs_are_those_in_front(tmp_path: Path) -> None:
    model = Exportable(lambda p, x: ([x, x], x), None, {"x": ROW}, outputs=["pair", "one"])

    found = manifest.read(model.write(tmp_path / "m" / "1")).outputs
    assert ["pair.0", "pair.1", "one"] == [spec.name for spec in found]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"a": {"b.c": ROW}}, "input 'b.c': expected a non-empty key without '.'"),
        ({"a.b": ROW, "a": {"b": ROW}}, "two inputs have the name 'a.b'; rename a key"),
        ({"a.c": ROW, "a": {"b": ROW}}, "input 'a.c': expected a non-empty key without"),
        ({"a": {1: ROW, "1": ROW}}, "input 'a' is not a pytree that JAX can flatten: Comparator"),
        ({"a": {"": ROW}}, "input '': expected a non-empty key"),
        ({"a": {}}, "input 'a' has no array"),
    ],
)
def test_trees_without_plain_names_are_refused(tmp_path: Path, inputs: Any, expected: str) -> None:
    with pytest.raises(InvalidModel, match=expected):
        Exportable(lambda p, *x: x[0], None, inputs, outputs=["y"]).write(tmp_path / "m" / "1")


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ({"a.b": 1, "a": {"b": 2}}, "two outputs have the name 'a.b'"),
        ({"a.c": 1, "a": [2]}, "output 'a.c': expected a non-empty key"),
        ({}, "expected at least one output, got a tree without arrays"),
    ],
)
def test_outputs_without_plain_names_are_refused(outputs: Any, expected: str) -> None:
    with pytest.raises(InvalidModel, match=expected):
        flatten_outputs(outputs)


def test_dots_stay_in_names_where_nothing_is_nested() -> None:
    flat, _ = flatten_inputs({"conv.1": ROW, "conv.2": ROW})

    assert ["conv.1", "conv.2"] == list(flat)
    assert {"conv.1": 1} == flatten_outputs({"conv.1": 1})
