import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from onnx import helper
from support.onnx_models import FLOAT, INT64, Inputs, X, model, node, save

from xlaserve.artifact import manifest
from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx import checking
from xlaserve.importers.onnx.given import with_constants
from xlaserve.importers.onnx.graph import Graph, GraphInput
from xlaserve.importers.onnx.importing import Options, import_model
from xlaserve.runtime.loaded import Stage
from xlaserve.tensors import DATATYPES, Tensor

WEIGHT = np.linspace(-1, 1, 4 * 300, dtype=np.float32).reshape(4, 300)


def _linear(directory: Path, inputs: Inputs = X) -> Path:
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("Relu", ["m"], ["y"])]
    return save(model(nodes, inputs, ["y"], {"w": WEIGHT}), directory)


def test_import_writes_a_version_with_its_weights_as_arguments(tmp_path: Path) -> None:
    imported = import_model(_linear(tmp_path), tmp_path / "models" / "m")

    assert tmp_path / "models/m/1" == imported.path
    described = manifest.read(imported.path)
    assert ["FP32[-1,4]"] == [str(spec) for spec in described.inputs]
    assert ["FP32[-1,300]"] == [str(spec) for spec in described.outputs]
    assert (32, ("w",), WEIGHT.nbytes) == (
        described.max_batch_size,
        described.parameters,
        described.parameters_bytes,
    )
    assert ("cpu", "cuda", "tpu") == described.platforms


def test_import_is_compared_for_two_batch_sizes(tmp_path: Path) -> None:
    checked = import_model(_linear(tmp_path), tmp_path / "m").checked

    assert checked is not None
    assert (1, 3) == checked.batches
    assert checked.worst.relative < 1e-6


def test_fixed_inputs_of_different_lengths_are_given_whole(tmp_path: Path) -> None:
    """A state of two layers next to one frame: neither length is a batch."""
    inputs: Inputs = {"x": (FLOAT, [1, 4]), "state": (FLOAT, [2, 4])}
    path = save(model([node("Add", ["x", "state"], ["y"])], inputs, ["y"]), tmp_path)

    checked = import_model(path, tmp_path / "m").checked

    assert checked is not None
    assert (0,) == checked.batches


def test_model_for_one_row_is_compared_row_by_row_once_its_batch_is_open(tmp_path: Path) -> None:
    path = _linear(tmp_path, {"x": (FLOAT, [1, 4])})

    fixed = import_model(path, tmp_path / "fixed")
    free = import_model(path, tmp_path / "free", Options(shapes={"x": (-1, 4)}))

    assert fixed.checked is not None
    assert free.checked is not None
    assert ((0,), 0) == (fixed.checked.batches, fixed.manifest.max_batch_size)
    assert ((1, 3), 32) == (free.checked.batches, free.manifest.max_batch_size)


def test_reshape_that_was_written_for_one_row_keeps_the_open_batch(tmp_path: Path) -> None:
    """Exporters without dynamic batches write Reshape to [1, 8]."""
    nodes = [node("Reshape", ["x", "shape"], ["flat"]), node("Softmax", ["flat"], ["y"])]
    made = model(nodes, {"x": (FLOAT, [1, 4, 2])}, ["y"], {"shape": np.asarray([1, 8])})

    options = Options(shapes={"x": (-1, 4, 2)})
    imported = import_model(save(made, tmp_path), tmp_path / "m", options)

    assert ["FP32[-1,8]"] == [str(spec) for spec in imported.manifest.outputs]
    assert imported.checked is not None


def test_next_version_is_written_and_none_is_overwritten(tmp_path: Path) -> None:
    path, options = _linear(tmp_path), Options(check=False)

    versions = [import_model(path, tmp_path / "m", options).path.name for _ in range(2)]

    assert ["1", "2"] == versions
    with pytest.raises(FileExistsError, match="already exists, and imports do not overwrite"):
        import_model(path, tmp_path / "m", Options(version=2))


def test_what_differs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing remains: no model, no version, no temporary directory."""
    real = checking.compared
    monkeypatch.setattr(
        checking, "compared", lambda spec, want, have, limit: real(spec, want, have + 1, limit)
    )
    repository = tmp_path / "models"

    with pytest.raises(InvalidModel, match="output 'y' differs from onnxruntime's by 1"):
        import_model(_linear(tmp_path), repository / "m")

    assert not repository.exists()


def test_stages_are_told_in_order(tmp_path: Path) -> None:
    seen: list[Stage] = []

    import_model(_linear(tmp_path), tmp_path / "m", on_stage=seen.append)

    assert [
        *("reading", "converting 1 of 2", "converting 2 of 2"),
        *("exporting", "checking 1 of 2", "checking 2 of 2"),
    ] == [str(stage) for stage in seen]


def test_rows_that_depend_on_one_another_are_imported_by_themselves(tmp_path: Path) -> None:
    nodes = [node("ReduceMean", ["x"], ["m"], axes=[0]), node("Sub", ["x", "m"], ["y"])]
    path = save(model(nodes, X, ["y"]), tmp_path)

    imported = import_model(path, tmp_path / "m")

    assert imported.manifest.verdict is not None
    assert ("mixed", 0) == (
        imported.manifest.verdict.independence,
        imported.manifest.max_batch_size,
    )
    assert "max_batch_size is 0 instead of 32; reduce over another axis" in imported.notice
    assert imported.checked is not None
    assert (1, 3) == imported.checked.batches


@pytest.mark.parametrize("axis", [1, -1])
def test_elements_that_are_gathered_within_a_row_keep_rows_apart(tmp_path: Path, axis: int) -> None:
    """As scikit-learn's AdaBoost selects the median of its estimators."""
    inputs: Inputs = {"x": (FLOAT, ["N", 4]), "at": (INT64, ["N", 2])}
    made = model([node("GatherElements", ["x", "at"], ["y"], axis=axis)], inputs, ["y"])
    imported = import_model(save(made, tmp_path), tmp_path / "m")

    assert 32 == imported.manifest.max_batch_size
    assert not imported.notice
    assert imported.checked is not None


def test_rows_that_depend_on_one_another_are_not_declared_away(tmp_path: Path) -> None:
    nodes = [node("ReduceMean", ["x"], ["m"], axes=[0]), node("Sub", ["x", "m"], ["y"])]
    path = save(model(nodes, X, ["y"]), tmp_path)

    with pytest.raises(InvalidModel, match="declared independent, but they are not"):
        import_model(path, tmp_path / "m", Options(batch_independent=True))
    assert [path] == list(tmp_path.iterdir())


def test_outputs_may_be_left_out(tmp_path: Path) -> None:
    nodes = [node("Relu", ["x"], ["y"]), node("ReduceSum", ["x"], ["total"])]
    path = save(model(nodes, X, ["total", "y"]), tmp_path)

    imported = import_model(path, tmp_path / "m", Options(outputs=["y"]))

    assert ["y"] == [spec.name for spec in imported.manifest.outputs]


def test_integers_keep_64_bits(tmp_path: Path) -> None:
    nodes = [node("Add", ["x", "large"], ["y"])]
    made = model(nodes, {"x": (INT64, ["N", 1])}, ["y"], {"large": np.asarray([2**40])})

    imported = import_model(save(made, tmp_path), tmp_path / "m")

    assert ["INT64[-1,1]"] == [str(spec) for spec in imported.manifest.outputs]


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_packages_are_optional(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Without onnx the error says what to install; without onnxruntime nothing is compared."""
    path = _linear(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "xlaserve.importers.onnx.reading", raising=False)
    monkeypatch.delattr("xlaserve.importers.onnx.reading", raising=False)

    if missing == "onnx":
        with pytest.raises(InvalidModel, match=r"pip install 'xlaserve\[onnx\]'"):
            import_model(path, tmp_path / "m")
    else:
        assert import_model(path, tmp_path / "m").checked is None


def test_several_sizes_are_compared_and_compiled(tmp_path: Path) -> None:
    """An input name that JAX cannot use is replaced."""
    inputs: Inputs = {"x": (FLOAT, ["N", "length (s)", 4])}
    path = save(model([node("MatMul", ["x", "w"], ["y"])], inputs, ["y"], {"w": WEIGHT}), tmp_path)
    imported = import_model(path, tmp_path / "m", Options(dimensions={"length (s)": (3, 5)}))

    assert {"length__s_": (3, 5)} == dict(imported.manifest.compiled_shapes)
    assert ["FP32[-1,-1,4]"] == list(map(str, imported.manifest.inputs))
    assert imported.checked is not None
    assert (1, 3) == imported.checked.batches


def test_shapes_may_name_what_the_model_does_not(tmp_path: Path) -> None:
    inputs: Inputs = {"x": (FLOAT, ["N", "", 4])}
    path = save(model([node("MatMul", ["x", "w"], ["y"])], inputs, ["y"], {"w": WEIGHT}), tmp_path)
    options = Options(shapes={"x": (-1, "s", 4)}, dimensions={"s": (2, 4)}, check=False)

    assert {"s": (2, 4)} == dict(
        import_model(path, tmp_path / "m", options).manifest.compiled_shapes
    )


def _stepped(directory: Path) -> Path:
    """Write a recurrent model with the batch second in its state, and with a rate as input."""
    then = helper.make_graph([node("Identity", ["sum"], ["wide"])], "then", [], [_any("wide")])
    otherwise = helper.make_graph([node("Neg", ["sum"], ["wide"])], "else", [], [_any("wide")])
    nodes = [
        node("ReduceSum", ["state", "first"], ["sum"], keepdims=0),
        node("Equal", ["rate", "sixteen"], ["is_wide"]),
        node("If", ["is_wide"], ["chosen"], then_branch=then, else_branch=otherwise),
        node("Add", ["x", "chosen"], ["y"]),
        node("Unsqueeze", ["y", "first"], ["row"]),
        node("Concat", ["row", "row"], ["next"], axis=0),
    ]
    inputs: Inputs = {
        "x": (FLOAT, ["N", 4]),
        "state": (FLOAT, [2, "N", 4]),
        "rate": (INT64, []),
    }
    constants = {"first": np.asarray([0]), "sixteen": np.asarray(16000)}
    return save(model(nodes, inputs, ["y", "next"], constants), directory)


def _any(name: str) -> Any:
    return helper.make_tensor_value_info(name, FLOAT, None)


RATE = {"rate": ("16000",)}
SECOND = {"state": 1, "next": 1}


def test_a_batch_that_is_not_first_is_moved_there_and_back(tmp_path: Path) -> None:
    options = Options(constants=RATE, batch_axes=SECOND)
    imported = import_model(_stepped(tmp_path), tmp_path / "m", options)
    described = imported.manifest

    assert ["FP32[-1,4]", "FP32[-1,2,4]"] == list(map(str, described.inputs))
    assert ["FP32[-1,4]", "FP32[-1,2,4]"] == list(map(str, described.outputs))
    assert ["x", "state"] == [spec.name for spec in described.inputs]
    assert 32 == described.max_batch_size
    assert imported.checked is not None
    assert imported.checked.worst.absolute < 1e-6


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (Options(constants={"sr": ("1",)}), "no input 'sr', it has x, state, rate"),
        (Options(constants={"rate": ("1.5",)}), "'rate': expected a number of INT64, got '1.5'"),
        (Options(constants={"rate": ("9" * 30,)}), "'rate': expected a number of INT64, got '999"),
        (
            Options(constants={"rate": ("1", "2")}),
            "expected 1 number or 1, for the shape [], got 2",
        ),
        (Options(constants={"x": ("1",)}), "'x' has the dynamic shape [N, 4]"),
        (Options(constants=RATE, batch_axes={"states": 1}), "no input or output 'states', it has"),
        (
            Options(constants=RATE, batch_axes={"state": 3}),
            "3 dimensions, so axis 3 cannot be its batch",
        ),
        (
            Options(batch_axes=SECOND),
            ", but either all inputs start with -1 or none: change a shape with --shape, locate the"
            " batch with --batch-axis, fix a dynamic first dimension that is not a batch with"
            " --dim, or make the input a constant with --const",
        ),
    ],
)
def test_what_cannot_be_given_is_named(tmp_path: Path, options: Options, text: str) -> None:
    with pytest.raises(InvalidModel, match=re.escape(text)):
        import_model(_stepped(tmp_path), tmp_path / "m", options)


def test_constants_are_numbers_of_their_datatype() -> None:
    kinds = {"FP32": "1e-3", "BF16": "0.5", "BOOL": "True", "UINT8": "255", "INT64": "-1"}
    inputs = [GraphInput(name, DATATYPES[name], (2,)) for name in kinds]
    left = GraphInput("left", DATATYPES["FP32"], ())
    graph = Graph("g", (*inputs, left), (), (), {})
    found, values = with_constants(graph, {name: (text,) for name, text in kinds.items()})

    assert (left,) == found.inputs
    assert values == found.constants
    assert [[1e-3] * 2, [0.5] * 2, [True] * 2, [255] * 2, [-1] * 2] == [
        np.asarray(values[name], np.float64).round(6).tolist() for name in kinds
    ]
    with pytest.raises(
        InvalidModel, match="every input is a constant, but a model needs at least one input"
    ):
        with_constants(replace(graph, inputs=(left,)), {"left": ("1",)})


def test_a_quantised_model_says_which_difference_is_allowed(tmp_path: Path) -> None:
    """The import prints output steps for quantized models only."""
    constants: dict[str, Tensor] = {
        "scale": np.asarray(0.5, np.float32),
        "zero": np.asarray(0, np.int8),
    }
    nodes = [
        node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    quantised = import_model(save(model(nodes, X, ["y"], constants), tmp_path), tmp_path / "m")
    plain = import_model(_linear(tmp_path), tmp_path / "n")

    assert quantised.checked is not None
    assert "4 steps of its quantization, of 0.5 each" == quantised.checked.allowed
    assert plain.checked is not None
    assert not plain.checked.allowed
