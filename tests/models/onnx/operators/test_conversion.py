"""Conversions to and from FLOAT8E8M0, powers of two without a sign."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Mapping
from types import MappingProxyType

import jax
import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")

import ml_dtypes
from onnx import TensorProto
from onnx.numpy_helper import to_float8e8m0

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx import planning
from xlaserve.importers.onnx.applying import apply
from xlaserve.importers.onnx.graph import Attribute, Graph, Node
from xlaserve.tensors import Tensor

_FRACTIONS = (0, 1, 0x1FFFFF, 0x200000, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF)

EDGES = np.asarray(
    [
        sign << 31 | exponent << 23 | fraction
        for sign in (0, 1)
        for exponent in range(256)
        for fraction in _FRACTIONS
    ],
    np.uint32,
).view(np.float32)
"""Every exponent, with the fractions at which the rounding modes differ."""

POWERS = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)

_NOTHING: Mapping[str, Attribute] = MappingProxyType({})


def _cast(x: Tensor, to: int, attributes: Mapping[str, Attribute] = _NOTHING) -> list[Tensor]:
    """Return the results of a Cast of a tensor, as a constant and traced."""
    node = Node("Cast", "", "", ("x",), ("y",), 25, {"to": to, **attributes})

    def computed(given: jax.Array) -> jax.Array:
        (found,) = apply(node, [given])
        assert isinstance(found, jax.Array)
        return found

    (known,) = apply(node, [x])
    assert isinstance(known, np.ndarray)
    return [known, np.asarray(jax.jit(computed)(x))]


@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
@pytest.mark.parametrize("saturate", [0, 1])
def test_a_number_is_rounded_to_a_power_of_two_as_onnx_rounds_it(mode: str, saturate: int) -> None:
    expected = to_float8e8m0(EDGES, bool(saturate), mode).view(np.uint8)
    attributes: Mapping[str, Attribute] = {"round_mode": mode, "saturate": saturate}

    for found in _cast(EDGES, TensorProto.FLOAT8E8M0, attributes):
        np.testing.assert_array_equal(expected, found.view(np.uint8))


@pytest.mark.parametrize(
    ("to", "dtype"), [(TensorProto.FLOAT, np.float32), (TensorProto.DOUBLE, np.float64)]
)
def test_each_power_of_two_is_its_number(to: int, dtype: type[np.floating]) -> None:
    """Including the smallest, which is subnormal in FP32."""
    for found in _cast(POWERS, to):
        assert dtype == found.dtype
        np.testing.assert_array_equal(POWERS.astype(np.float32).astype(dtype)[1:], found[1:])
    known, traced = (found[0] for found in _cast(POWERS, TensorProto.FLOAT))
    assert 2.0**-127 == known == traced


def test_another_way_of_rounding_is_named() -> None:
    with pytest.raises(InvalidModel, match="round_mode: expected up, down, nearest, got even"):
        _cast(EDGES, TensorProto.FLOAT8E8M0, {"round_mode": "even"})


def test_an_output_of_powers_of_two_is_fp32() -> None:
    node = Node("Identity", "", "", ("x",), ("y",), 25, {})
    plan = planning.plan(
        Graph("g", (), ("y",), (node,), {}),
        {"x": jax.ShapeDtypeStruct(POWERS.shape, POWERS.dtype)},
    )
    found = np.asarray(jax.jit(plan)({}, {"x": POWERS})["y"])

    np.testing.assert_array_equal(POWERS.astype(np.float32).view(np.int32), found.view(np.int32))
