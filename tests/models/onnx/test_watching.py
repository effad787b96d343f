"""onnxruntime runs of imported models are limited in time and memory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from onnx import ModelProto, TensorProto, helper
from support.onnx_models import graph_of, model, node, save

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx import signature
from xlaserve.importers.onnx.checking import Reference
from xlaserve.importers.onnx.watching import Watch
from xlaserve.tensors import Tensor

X = {"x": np.ones((1, 2), np.float32)}


def endless(tmp_path: Path, **limits: Any) -> Reference:
    """Return a model that halves its input in a practically endless loop."""
    body = helper.make_graph(
        [node("Identity", ["on"], ["on_out"]), node("Mul", ["s", "half"], ["s_out"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("on_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("s_out", TensorProto.FLOAT, None),
        ],
    )
    constants: dict[str, Tensor] = {
        "most": np.asarray(1 << 62, np.int64),
        "half": np.asarray(0.5, np.float32),
    }
    loop = node("Loop", ["most", "", "x"], ["y"], body=body)
    made = model([loop], {"x": (TensorProto.FLOAT, ["n", 2])}, ["y"], constants)
    return reference(made, tmp_path, **limits)


def reference(made: ModelProto, tmp_path: Path, **limits: Any) -> Reference:
    graph = graph_of(made)
    inputs = signature.resolve(graph.inputs, shapes={}, dimensions={}, max_batch_size=None)
    return Reference(save(made, tmp_path), graph, inputs, **limits)


def test_a_loop_that_does_not_end_is_ended(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidModel, match=r"did not end in 0\.2 seconds; import it without a comparison"
    ):
        endless(tmp_path, seconds=0.2).run(X, ["y"])


def test_what_takes_too_much_memory_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check reads the memory of the process, which grows by a mebibyte per check here."""
    had = iter(range(0, 1 << 40, 1 << 20))
    monkeypatch.setattr("xlaserve.importers.onnx.watching.resident_bytes", lambda: next(had))

    with pytest.raises(
        InvalidModel, match="it took more than 3000000 bytes; import it without a comparison"
    ):
        endless(tmp_path, most_bytes=3_000_000).run(X, ["y"])


def test_what_follows_from_constants_alone_is_ended_too(tmp_path: Path) -> None:
    """onnxruntime must not fold it while reading the file, where nothing could stop it."""
    nodes = [node("ConstantOfShape", ["size"], ["c0"])]
    nodes += [node("Sin", [f"c{n}"], [f"c{n + 1}"]) for n in range(400)]
    nodes += [node("ReduceSum", ["c400"], ["sum"], keepdims=0), node("Add", ["x", "sum"], ["y"])]
    constants: dict[str, Tensor] = {"size": np.asarray([1 << 20], np.int64)}
    made = model(nodes, {"x": (TensorProto.FLOAT, ["n", 2])}, ["y"], constants)

    with pytest.raises(
        InvalidModel, match=r"did not end in 0\.05 seconds; import it without a comparison"
    ):
        reference(made, tmp_path, seconds=0.05).run(X, ["y"])


def test_what_ends_by_itself_is_left_alone() -> None:
    options: Any = SimpleNamespace(terminate=False)

    with Watch(options, 600.0, 1 << 40) as watch:
        pass

    assert ("", False) == (watch.reason, options.terminate)
