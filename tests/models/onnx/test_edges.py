"""Datatypes that the V2 protocol lacks, as graph inputs and outputs."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")

from onnx import TensorProto
from support.onnx_models import model, node, ours, save

from xlaserve.artifact import manifest
from xlaserve.importers.onnx.datatypes import any_dtype_of, edge_of, is_narrow
from xlaserve.importers.onnx.importing import Options, import_model

KINDS = {
    "FLOAT8E4M3FN": "FP16",
    "FLOAT8E5M2": "FP16",
    "FLOAT4E2M1": "FP16",
    "INT4": "INT8",
    "UINT4": "UINT8",
    "INT2": "INT8",
    "UINT2": "UINT8",
}
"""Datatypes of inputs, and the datatypes in which clients send them."""


@pytest.mark.parametrize("number", range(17, 27))
def test_every_number_is_the_same_at_the_edge(number: int) -> None:
    """All 256, 16 or 4 values."""
    dtype = any_dtype_of(number)
    kinds: dict[str, Any] = {"i": ml_dtypes.iinfo, "f": ml_dtypes.finfo}
    bits = kinds["i" if "int" in dtype.name else "f"](dtype).bits
    numbers = np.arange(2**bits, dtype=np.uint8).view(dtype) if bits == 8 else None
    if numbers is None:
        wide = np.arange(-8, 16).astype(np.float32)
        numbers = np.unique(wide.astype(dtype).astype(np.float32)).astype(dtype)

    assert is_narrow(dtype)
    back = numbers.astype(edge_of(dtype)).astype(dtype)
    np.testing.assert_array_equal(numbers.astype(np.float32), back.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_and_outputs_are_wider_than_in_the_model(kind: str, tmp_path: Path) -> None:
    """The import says so; it runs without onnxruntime, which expects the narrow types."""
    made = model(
        [node("Identity", ["x"], ["y"]), node("Cast", ["x"], ["z"], to=TensorProto.FLOAT)],
        {"x": (getattr(TensorProto, kind), ["N", 3])},
        ["y", "z"],
    )
    imported = import_model(save(made, tmp_path), tmp_path / "m", Options(check=False))
    described = manifest.read(imported.path)

    assert [KINDS[kind]] == [spec.datatype.name for spec in described.inputs]
    assert [KINDS[kind], "FP32"] == [spec.datatype.name for spec in described.outputs]
    assert f"input 'x' is {kind} in the model, but clients send {KINDS[kind]}" in imported.notice


def test_what_is_sent_is_rounded_as_onnx_casts() -> None:
    """A number beyond the range is the largest, one between two is the nearest; of 4 bits the low
    ones count (onnx, Cast)."""
    floats = model(
        [node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)],
        {"x": (TensorProto.FLOAT8E4M3FN, [3])},
        ["y"],
    )
    integers = model(
        [node("Cast", ["x"], ["y"], to=TensorProto.INT32)], {"x": (TensorProto.INT4, [3])}, ["y"]
    )
    (found,) = ours(floats, {"x": np.asarray([1000, 1.03, -2], np.float16)})
    (low,) = ours(integers, {"x": np.asarray([7, -8, 17], np.int8)})

    assert [448.0, 1.0, -2.0] == found.tolist()
    assert [7, -8, 1] == low.tolist()
