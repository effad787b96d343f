"""Fourier transforms against numpy's and onnxruntime's, and operators that are refused."""

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from support.onnx_models import exported, largest_difference, model, node, ours, single, theirs

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators import find

RANDOM = np.random.default_rng(9)
FLOAT = 1


@pytest.mark.parametrize("length", [6, 13])
@pytest.mark.parametrize("one_sided", [0, 1])
def test_a_transform_there_and_back_is_numpys_for_any_batch(length: int, one_sided: int) -> None:
    """A length below that of the signal truncates it; a larger one pads with zeros."""
    x = RANDOM.standard_normal((3, 9, 1), np.float32)
    nodes = [
        node("DFT", ["x", "length", "axis"], ["y"], onesided=one_sided),
        node("DFT", ["y", "length", "axis"], ["z"], onesided=one_sided, inverse=1),
    ]
    constants = {"length": np.asarray(length), "axis": np.asarray(1)}
    made = model(nodes, {"x": (FLOAT, ["N", 9, 1])}, ["y", "z"], constants, opset=20)

    forth, back = exported(made, "b", {"x": "b,9,1"})({"x": x})

    spectrum = (np.fft.rfft if one_sided else np.fft.fft)(x[..., 0], length)
    expected = np.stack([spectrum.real, spectrum.imag], -1).astype(np.float32)
    assert largest_difference([expected], [forth]) < 1e-5
    kept = np.pad(x[:, :length, 0], ((0, 0), (0, max(0, length - 9))))
    assert largest_difference([kept], [back[..., 0]]) < 1e-5


@pytest.mark.parametrize("one_sided", [0, 1])
def test_a_short_time_transform_is_that_of_onnxruntime(one_sided: int) -> None:
    given = {"x": RANDOM.standard_normal((2, 21, 1), np.float32)}
    constants = {"step": np.asarray(3), "window": np.hanning(8).astype(np.float32)}
    made = single("STFT", given, constants, onesided=one_sided)

    assert largest_difference(theirs(made, given), ours(made, given)) < 1e-5


def test_a_determinant_takes_any_batch() -> None:
    """A 5 x 5 matrix, for which there is no simple formula."""
    made = model([node("Det", ["x"], ["y"])], {"x": (FLOAT, ["N", 5, 5])}, ["y"], opset=22)
    given = {"x": RANDOM.standard_normal((3, 5, 5), np.float32)}

    assert (
        largest_difference(theirs(made, given), exported(made, "b", {"x": "b,5,5"})(given)) < 1e-5
    )


@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_global_norm_is_that_of_onnxruntime(p: int) -> None:
    given = {"x": RANDOM.standard_normal((2, 3, 4, 5), np.float32)}
    made = single("GlobalLpPool", given, p=p)

    assert largest_difference(theirs(made, given), ours(made, given)) < 1e-5


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Adam", "it is a training operator, which serving does not support"),
        ("Momentum", "it is a training operator, which serving does not support"),
        ("ImageDecoder", "decode them before the model"),
        ("StringSplit", "it computes with strings, which JAX does not support"),
        ("TfIdfVectorizer", "it computes with strings, which JAX does not support"),
    ],
)
def test_an_operator_that_will_not_be_there_is_refused_with_the_reason(
    name: str, reason: str
) -> None:
    with pytest.raises(InvalidModel, match=f"{name} 'the_one'.*cannot be converted.*{reason}"):
        find(Node(name, "", "the_one", (), ("y",), 20, {}))
