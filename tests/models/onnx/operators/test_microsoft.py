"""Operators of com.microsoft, compared with onnxruntime, the only other implementation."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import onnx
from onnx import helper, numpy_helper
from support.onnx_models import largest_difference, ours, theirs

from xlaserve.errors import InvalidModel
from xlaserve.tensors import Tensor

RANDOM = np.random.default_rng(10)


def _normal(*shape: int) -> Tensor:
    return RANDOM.standard_normal(shape, np.float32)


def _bytes(*shape: int) -> Tensor:
    return RANDOM.integers(0, 256, shape).astype(np.uint8)


def _seven_bits(*shape: int) -> Tensor:
    """Return signed values whose pairwise products with unsigned ones sum up within 16 bits.

    With AVX2 but no VNNI, onnxruntime adds such pairs with saturation.
    """
    return _bytes(*shape).view(np.int8) // 2


def _equal(first: int, rows: int, last: int) -> Tensor:
    """Return rows that are equal: onnxruntime rounds those of a thread with a scale of their own,
    so that others depend on its number of threads."""
    return np.repeat(_normal(first, 1, last), rows, axis=1)


def _one(
    operator: str, inputs: Sequence[Tensor | None], outputs: int = 1, **attributes: Any
) -> tuple[onnx.ModelProto, Mapping[str, Tensor]]:
    """Return a model of one node, and its inputs: the first is an input, the others constants."""
    names = ["" if value is None else f"x{place}" for place, value in enumerate(inputs)]
    named = {name: value for name, value in zip(names, inputs, strict=True) if value is not None}
    results = [f"y{place}" for place in range(outputs)]
    made = helper.make_node(
        operator, names, results, name="the_node", domain="com.microsoft", **attributes
    )
    x = named.pop("x0")
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [made],
        "small",
        [helper.make_tensor_value_info("x0", kind, x.shape)],
        [helper.make_empty_tensor_value_info(name) for name in results],
        [numpy_helper.from_array(value, name) for name, value in named.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), {"x0": x}


SCALE, OTHER = np.asarray(0.02, np.float32), np.asarray(0.035, np.float32)
ZERO, POINT = np.asarray(117, np.uint8), np.asarray(131, np.uint8)
UNIT, NONE, WIDE = (
    np.asarray(1 / 256, np.float32),
    np.asarray(0, np.uint8),
    np.asarray(0.4, np.float32),
)
X3, X2, X4 = _normal(2, 5, 8), _normal(3, 8), _normal(2, 4, 6, 5)
IDS = RANDOM.integers(0, 7, (2, 5)).astype(np.int32)
HEADS = _normal(2, 5, 12)
MASK = np.asarray([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], np.int32)
CACHE = {"cos": np.cos(_normal(9, 2)), "sin": np.sin(_normal(9, 2))}
ADDED = 0.1 * _normal(1, 2, 5, 5)

FLOATS: list[tuple[str, list[Tensor | None], dict[str, Any]]] = [
    ("Gelu", [X3], {}),
    ("FastGelu", [X3, _normal(8)], {}),
    ("BiasGelu", [X3, _normal(8)], {}),
    ("QuickGelu", [X3], {"alpha": 1.3}),
    ("FusedMatMul", [X3, _normal(2, 3, 8)], {"transB": 1, "alpha": 0.3}),
    ("FusedMatMul", [_normal(3, 2, 4), _normal(2, 4, 5)], {"transBatchA": 1}),
    ("TransposeMatMul", [X3, _normal(2, 5, 3)], {"transA": 1}),
    (
        "FusedGemm",
        [X2, _normal(8, 4), _normal(4)],
        {"activation": "LeakyRelu", "activation_alpha": 0.2, "alpha": 0.5, "beta": 2.0},
    ),
    (
        "FusedConv",
        [X4, _normal(3, 4, 3, 3), _normal(3)],
        {"activation": "Clip", "activation_params": [-0.5, 0.7], "pads": [1, 1, 1, 1]},
    ),
    ("FusedConv", [X4, _normal(3, 4, 1, 1), None, _normal(2, 3, 6, 5)], {"activation": "Relu"}),
    ("Inverse", [_normal(2, 4, 4)], {}),
    ("SkipLayerNormalization", [X3, _normal(2, 5, 8), _normal(8), _normal(8), _normal(8)], {}),
    ("SkipSimplifiedLayerNormalization", [X3, _normal(2, 5, 8), _normal(8)], {"epsilon": 0.1}),
    (
        "EmbedLayerNormalization",
        [IDS, IDS % 2, _normal(7, 8), _normal(5, 8), _normal(2, 8), _normal(8), _normal(8), MASK],
        {"outputs": 2},
    ),
    (
        "RotaryEmbedding",
        [HEADS, RANDOM.integers(0, 9, (2, 5)), CACHE["cos"], CACHE["sin"]],
        {"interleaved": 1},
    ),
    ("RotaryEmbedding", [HEADS, np.asarray([3]), CACHE["cos"], CACHE["sin"]], {}),
    ("Attention", [X3, _normal(8, 12), _normal(12), MASK], {"num_heads": 2}),
    (
        "Attention",
        [X3, _normal(8, 12), _normal(12), None, None, ADDED],
        {"num_heads": 2, "unidirectional": 1},
    ),
    (
        "MultiHeadAttention",
        [HEADS, _normal(2, 5, 12), _normal(2, 5, 12), _normal(36), MASK],
        {"num_heads": 3, "scale": 0.4},
    ),
    (
        "DynamicQuantizeLSTM",
        [
            *(_equal(5, 2, 8), _bytes(2, 8, 24), _bytes(2, 6, 24), _normal(2, 48), None),
            *(_equal(2, 2, 6), _equal(2, 2, 6), _normal(2, 18)),
            *(np.full(2, 0.01, np.float32), _bytes(2), np.full(2, 0.02, np.float32), _bytes(2)),
        ],
        {"hidden_size": 6, "direction": "bidirectional", "outputs": 3},
    ),
    (
        "DynamicQuantizeLSTM",
        [
            *(_normal(5, 1, 8), _seven_bits(1, 8, 24), _seven_bits(1, 6, 24)),
            *(None, None, None, None, None),
            *(abs(_normal(1, 24)) / 99, np.zeros((1, 24), np.int8)),
            *(abs(_normal(1, 24)) / 99, np.zeros((1, 24), np.int8)),
        ],
        {"hidden_size": 6, "direction": "reverse"},
    ),
    ("DynamicQuantizeMatMul", [X3, _bytes(8, 3), SCALE, ZERO, _normal(3)], {}),
    (
        "MatMulIntegerToFloat",
        [_bytes(3, 8), _bytes(8, 4), SCALE, abs(_normal(4)), ZERO, _bytes(4), _normal(4)],
        {},
    ),
    ("QGemm", [_bytes(3, 8), SCALE, ZERO, _bytes(4, 8), OTHER, POINT], {"transB": 1}),
    ("DequantizeLinear", [_bytes(3, 4), abs(_normal(4)), _bytes(4)], {"axis": 1}),
]


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes"),
    FLOATS,
    ids=[f"{row[0]}-{place}" for place, row in enumerate(FLOATS)],
)
def test_an_operator_on_floats_is_that_of_onnxruntime(
    operator: str, inputs: Sequence[Tensor | None], attributes: dict[str, Any]
) -> None:
    made, given = _one(operator, inputs, **attributes)

    assert largest_difference(theirs(made, given), ours(made, given)) < 2e-5


LEVELS: list[tuple[str, list[Tensor | None], dict[str, Any]]] = [
    ("QLinearAdd", [_bytes(2, 5), SCALE, ZERO, _bytes(5), OTHER, POINT, OTHER, ZERO], {}),
    ("QLinearMul", [_bytes(2, 5), SCALE, ZERO, _bytes(2, 5), OTHER, POINT, OTHER, ZERO], {}),
    ("QLinearSigmoid", [_bytes(2, 5), SCALE, ZERO, UNIT, NONE], {}),
    ("QLinearLeakyRelu", [_bytes(2, 5), SCALE, ZERO, OTHER, POINT], {"alpha": 0.3}),
    (
        "QLinearSoftmax",
        [_bytes(2, 5), OTHER, ZERO, UNIT, NONE],
        {"opset": 13},
    ),
    (
        "QLinearSoftmax",
        [_bytes(2, 3, 5), OTHER, ZERO, UNIT, NONE],
        {"opset": 12, "axis": 1},
    ),
    (
        "QLinearAveragePool",
        [_bytes(1, 2, 6, 5), SCALE, ZERO, OTHER, POINT],
        {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 0, 1]},
    ),
    (
        "QLinearGlobalAveragePool",
        [_bytes(2, 5, 6, 3), SCALE, ZERO, OTHER, POINT],
        {"channels_last": 1},
    ),
    (
        "QLinearConv",
        [_bytes(1, 6, 5, 2), SCALE, ZERO, _bytes(3, 2, 3, 3), OTHER, POINT, OTHER, ZERO],
        {"channels_last": 1, "pads": [1, 1, 1, 1]},
    ),
    (
        "QGemm",
        [
            _bytes(3, 8),
            SCALE,
            ZERO,
            _bytes(8, 4),
            OTHER,
            POINT,
            np.arange(4, dtype=np.int32) * 500,
            WIDE,
            POINT,
        ],
        {"alpha": 0.7},
    ),
    ("QuantizeLinear", [_normal(3, 4), abs(_normal(4)) + 0.01, _bytes(4)], {"axis": 1}),
]


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes"),
    LEVELS,
    ids=[f"{row[0]}-{place}" for place, row in enumerate(LEVELS)],
)
def test_an_operator_on_levels_is_at_most_one_of_them_from_onnxruntime(
    operator: str, inputs: Sequence[Tensor | None], attributes: dict[str, Any]
) -> None:
    made, given = _one(operator, inputs, **attributes)
    (expected,), (found,) = theirs(made, given), ours(made, given)

    assert (expected.shape, expected.dtype) == (found.shape, found.dtype)
    far = np.abs(expected.astype(np.int64) - found.astype(np.int64))
    assert far.max() <= 1
    assert np.count_nonzero(far) <= far.size / 10


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("points", ["none", "packed"])
def test_weights_of_few_bits_are_unpacked_as_onnxruntime_does(bits: int, points: str) -> None:
    """40 rows in blocks of 16: the last is half full, and its zero points share a byte."""
    scales = abs(_normal(5, 3)).astype(np.float32)
    zeros = _bytes(5, -(-3 * bits // 8)) if points == "packed" else None
    made, given = _one(
        "MatMulNBits",
        [_normal(2, 3, 40), _bytes(5, 3, 16 * bits // 8), scales.reshape(-1), zeros],
        bits=bits,
        block_size=16,
        N=5,
        K=40,
    )

    assert largest_difference(theirs(made, given), ours(made, given)) < 2e-5


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "said"),
    [
        ("RotaryEmbedding", FLOATS[14][1], {"scale": 2.0}, "a scale are not implemented"),
        ("FusedConv", FLOATS[9][1], {"activation": "Elu"}, "expected Clip.*got Elu"),
        ("MultiHeadAttention", [HEADS], {"num_heads": 2}, "packed queries"),
        ("Attention", FLOATS[16][1], {"num_heads": 2, "do_rotary": 1}, "do_rotary"),
        ("Gelu", [X3], {"approximate": "tanh"}, "attribute 'approximate' is not implemented"),
        ("BeamSearch", [X3], {}, "not one of the"),
    ],
)
def test_what_would_not_be_obeyed_is_refused(
    operator: str, inputs: Sequence[Tensor | None], attributes: dict[str, Any], said: str
) -> None:
    made, given = _one(operator, inputs, **attributes)

    with pytest.raises(InvalidModel, match=f"com.microsoft.{operator} 'the_node'.*{said}"):
        ours(made, given)
