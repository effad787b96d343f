from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, external_data_helper, helper
from support.onnx_models import FLOAT, X, model, node, save, single

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx import reading
from xlaserve.importers.onnx.importing import import_model
from xlaserve.tensors import Tensor

WEIGHT = np.arange(8, dtype=np.float32).reshape(4, 2)
ROWS = np.ones((1, 4), np.float32)


def _refused(data: bytes) -> str:
    with pytest.raises(InvalidModel) as caught:
        reading.parse(data)
    return str(caught.value)


def _external(directory: Path, location: str = "weights.bin", **said: str) -> Path:
    """Write a model that references a weight in another file."""
    made = model([node("MatMul", ["x", "w"], ["y"])], X, ["y"], {"w": WEIGHT})
    tensor = made.graph.initializer[0]
    external_data_helper.set_external_data(tensor, location)
    tensor.ClearField("raw_data")
    for key, value in said.items():
        tensor.external_data.add(key=key, value=value)
    return save(made, directory)


def _weight(path: Path) -> Tensor:
    return reading.read(path).graph.constants["w"]


# --- files -------------------------------------------------------------------------------------


def test_external_data_beside_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"12345678" + WEIGHT.tobytes())
    path = _external(tmp_path, offset="8", length="32")

    np.testing.assert_array_equal(WEIGHT, _weight(path))


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/passwd", "a/../../weights.bin", ""])
def test_external_data_cannot_leave_the_directory_of_the_model(
    tmp_path: Path, location: str
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    path = _external(inner, "weights.bin")
    made = onnx.load(path, load_external_data=False)
    made.graph.initializer[0].external_data[0].value = location
    path.write_bytes(made.SerializeToString())

    with pytest.raises(InvalidModel, match="outside of the model's directory"):
        _weight(path)


def test_external_data_does_not_follow_a_link_out(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret").write_bytes(WEIGHT.tobytes())
    (inner / "weights.bin").symlink_to(tmp_path / "secret")

    with pytest.raises(InvalidModel, match="outside of the model's directory"):
        _weight(_external(inner))


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"offset": "4"}, "ends before byte 36"),
        ({"offset": "-1"}, "expected a number of bytes"),
        ({"offset": "9" * 30}, "expected a number of bytes"),
        ({"length": "31"}, "expected 32 bytes, got 31"),
    ],
)
def test_external_data_of_another_size_is_refused(
    tmp_path: Path, said: dict[str, str], problem: str
) -> None:
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())

    with pytest.raises(InvalidModel, match=problem):
        _weight(_external(tmp_path, **said))


def test_missing_external_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"weights\.bin is missing"):
        _weight(_external(tmp_path))


def test_the_limit_holds_for_the_model_and_its_data_together(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    path = _external(tmp_path)
    size = path.stat().st_size

    assert reading.read(path, size + 32).graph.nodes
    with pytest.raises(InvalidModel, match="size exceeds the limit"):
        reading.read(path, size + 31)
    with pytest.raises(InvalidModel, match="more than the"):
        reading.read(path, size - 1)


# --- what a model may be -----------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"not a model", b"\x08\x09", b"\xff" * 64])
def test_what_is_no_model_is_refused(data: bytes) -> None:
    assert "not an ONNX model" in _refused(data)


@given(data=st.data())
@settings(max_examples=150)
def test_a_damaged_model_is_refused_or_read(data: st.DataObject) -> None:
    """Any bytes result in a graph or in InvalidModel."""
    good = bytearray(single("MatMul", {"x": ROWS}, {"w": WEIGHT}).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(good) - 1))
        good[place] = data.draw(st.integers(0, 255))
    del good[data.draw(st.integers(len(good) // 2, len(good))) :]

    try:
        found = reading.parse(bytes(good))
    except InvalidModel:
        return
    assert found.graph.nodes is not None


def test_an_older_model_is_brought_to_the_oldest_opset() -> None:
    """In opset 11 Softmax flattens the dimensions from its axis on."""
    made = single("Softmax", {"x": np.ones((2, 3, 4), np.float32)}, opset=11, axis=1)

    found = reading.parse(made.SerializeToString())

    assert 11 == found.opset
    assert {reading.OLDEST_OPSET} == {item.opset for item in found.graph.nodes}


def test_a_newer_opset_is_refused() -> None:
    made = single("Relu", {"x": ROWS})
    made.opset_import[0].version = reading.NEWEST_OPSET + 1

    assert "expected 13 to" in _refused(made.SerializeToString())


def test_a_node_that_reads_what_nothing_computes_is_named() -> None:
    made = model([node("Relu", ["x"], ["y"])], X, ["y"])
    made.graph.node[0].input[0] = "z"

    assert "Relu 'the_y' (opset 17) reads 'z'" in _refused(made.SerializeToString())


def test_a_value_is_computed_once() -> None:
    made = model([node("Relu", ["x"], ["y"])], X, ["y"])
    made.graph.node.append(node("Abs", ["x"], ["y"]))

    assert "computes 'y', which already exists" in _refused(made.SerializeToString())


def test_an_input_of_text_is_refused_by_name(tmp_path: Path) -> None:
    """By an import, which writes what needs no text on the host."""
    made = model([node("Cast", ["x"], ["y"], to=1)], {"x": (TensorProto.STRING, ["N"])}, ["y"])
    with pytest.raises(InvalidModel, match="'x' is a string: .* only casts .* without an import"):
        import_model(save(made, tmp_path), tmp_path / "models" / "m")

    assert not (tmp_path / "models").exists()


def test_functions_of_the_model_are_inlined() -> None:
    body = [helper.make_node("Add", ["a", "a"], ["b"])]
    imports = [helper.make_opsetid("", 17)]
    function = helper.make_function("mine", "Double", ["a"], ["b"], body, imports)
    made = model([node("Relu", ["x"], ["y"])], X, ["y"])
    made.graph.node[0].CopyFrom(helper.make_node("Double", ["x"], ["y"], domain="mine"))
    made.functions.append(function)
    made.opset_import.append(helper.make_opsetid("mine", 1))

    found = reading.parse(made.SerializeToString())

    assert ["Add"] == [item.operator for item in found.graph.nodes]


def test_an_initializer_is_no_input_though_old_files_list_it() -> None:
    made = model([node("MatMul", ["x", "w"], ["y"])], X, ["y"], {"w": WEIGHT})
    made.graph.input.append(helper.make_tensor_value_info("w", FLOAT, [4, 2]))

    found = reading.parse(made.SerializeToString())

    assert ["x"] == [item.name for item in found.graph.inputs]
