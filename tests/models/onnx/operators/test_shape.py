# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from itertools import pairwise

import jax
import jax.export
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.applying import apply
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.indexing import slice_of
from xlaserve.importers.onnx.operators.joining import even_parts
from xlaserve.importers.onnx.operators.shape import is_for_one_row, target_shape
from xlaserve.importers.onnx.sequences import tensor_of
from xlaserve.importers.onnx.values import (
    Dimensions,
    Value,
    broadcast_shape,
    dimensions_of,
    host_of,
    is_host,
)

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)
B, S = dimensions_of(np.asarray(jax.export.symbolic_shape("b, s"), np.object_))


def _evaluated(dimensions: Dimensions, **sizes: int) -> list[int]:
    """Return dimensions with numbers substituted for the symbols."""
    names = {"b": sizes["b"], "s": sizes["s"]}
    return [
        int(eval(str(size), {"floordiv": lambda x, y: x // y, "max": max, "min": min}, names))
        for size in dimensions
    ]


def _run(operator: str, *inputs: Value, outputs: int = 1, **attributes: int) -> list[Value]:
    names = tuple(f"y{index}" for index in range(outputs))
    found = apply(Node(operator, "", "", (), names, 17, attributes), inputs)
    return [tensor_of(value, "a result") for value in found]


# --- Reshape -----------------------------------------------------------------------------------


@given(st.data(), SIZES)
def test_reshape_is_that_of_numpy_with_zero_for_a_size_that_is_kept(
    data: st.DataObject, shape: list[int]
) -> None:
    elements = math.prod(shape)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(shape)), max_size=3)) | {0, len(shape)})
    wanted = [math.prod(shape[start:end]) for start, end in pairwise(cuts)]
    asked: list[int] = list(wanted)
    for index, size in enumerate(asked):
        if index < len(shape) and shape[index] == size and data.draw(st.booleans()):
            asked[index] = 0
    if data.draw(st.booleans()):
        asked[data.draw(st.integers(0, len(asked) - 1))] = -1

    found = target_shape(shape, asked, keep_zeros=False)

    assert tuple(wanted) == found
    assert elements == math.prod(found)


@pytest.mark.parametrize(
    ("shape", "asked", "expected"),
    [
        ((B, S, 12), (B, S, 3, 4), "(b, s, 3, 4)"),
        ((B, S, 12), (0, -1), "(b, 12*s)"),
        ((B, S, 12), (-1, 12), "(b*s, 12)"),
        ((B * S, 12), (B, S, -1), "(b, s, 12)"),
        ((B, 4, S), (B, -1, 2), "(b, 2*s, 2)"),
        ((B, 3), (B, -1), "(b, 3)"),
    ],
)
def test_reshape_calculates_with_symbolic_dimensions(
    shape: Dimensions, asked: Dimensions, expected: str
) -> None:
    assert expected == str(target_shape(shape, asked, keep_zeros=False))


@pytest.mark.parametrize(
    ("shape", "asked", "problem"),
    [
        ((2, 3), (-1, -1), "-1 more than once"),
        ((2, 3), (4, -1), "cannot compute the size for -1"),
        ((2, 3), (5,), "cannot be reshaped to"),
        ((2,), (1, 1, 0), "has a 0 at index 2"),
        ((B, 3), (B, 4), "cannot be reshaped to"),
    ],
)
def test_reshape_that_does_not_fit_is_refused(
    shape: Dimensions, asked: Dimensions, problem: str
) -> None:
    with pytest.raises(InvalidModel, match=problem):
        target_shape(shape, asked, keep_zeros=False)


def test_zeros_of_allowzero_are_sizes() -> None:
    assert (0, 3) == target_shape((3, 0), (0, 3), keep_zeros=True)


@pytest.mark.parametrize(
    ("shape", "asked", "expected"),
    [
        ((B, 2, 4), (1, 8), True),
        ((B, 2, 4), (1, -1), False),
        ((3, 2, 4), (1, 8), False),
        ((B, 2, 4), (1, 9), False),
    ],
)
def test_reshape_for_one_row_is_recognised(
    shape: Dimensions, asked: Dimensions, expected: bool
) -> None:
    assert expected == is_for_one_row(shape, asked)


# --- Slice -------------------------------------------------------------------------------------

BOUNDS = st.one_of(st.integers(-12, 12), st.sampled_from([2**31 - 1, 2**63 - 1, -(2**63)]))


@given(
    size=st.integers(0, 8),
    start=BOUNDS,
    end=BOUNDS,
    step=st.integers(-3, 3).filter(bool),
)
def test_slice_is_that_of_python_for_any_bounds_and_steps(
    size: int, start: int, end: int, step: int
) -> None:
    elements = list(range(size))

    assert elements[start:end:step] == elements[slice_of(size, start, end, step)]


@pytest.mark.parametrize(
    ("start", "end", "step", "expected"),
    [
        (0, 2**63 - 1, 1, "[b]"),
        (1, 2**31 - 1, 1, "[b - 1]"),
        (0, -1, 1, "[b - 1]"),
        (0, B, 1, "[b]"),
    ],
)
def test_slice_of_a_symbolic_dimension_is_symbolic(
    start: int, end: int, step: int, expected: str
) -> None:
    picked = slice_of(B, start, end, step)

    def trace(x: jax.Array) -> jax.Array:
        return x[picked]

    found = jax.eval_shape(trace, jax.ShapeDtypeStruct((B,), np.float32))

    assert expected == str(list(found.shape))


# --- the rest ----------------------------------------------------------------------------------


@given(mutually_broadcastable_shapes(num_shapes=3, max_dims=4, min_side=0, max_side=4))
def test_broadcasting_is_that_of_numpy(shapes: tuple[tuple[tuple[int, ...], ...], object]) -> None:
    given_shapes, expected = shapes

    assert expected == broadcast_shape(*given_shapes)


def test_broadcasting_keeps_symbolic_dimensions() -> None:
    assert (B, 4, S) == broadcast_shape((B, 1, S), (4, 1))
    with pytest.raises(InvalidModel, match="cannot be broadcast"):
        broadcast_shape((B,), (S,))


@given(size=st.integers(1, 40), count=st.integers(1, 6))
def test_even_parts_are_equal_but_for_the_last(size: int, count: int) -> None:
    parts = even_parts(size, count)

    assert (size, count) == (sum(parts), len(parts))
    assert 1 >= len(set(parts[:-1]))


@given(
    operator=st.sampled_from(["Add", "Sub", "Mul", "Div", "Max", "Min"]),
    left=st.lists(st.sampled_from([1, 2, 6, B, 2 * B, B * S]), min_size=3, max_size=3),
    right=st.sampled_from([1, 2, 3]),
)
def test_shape_arithmetic_holds_for_every_size(operator: str, left: list[int], right: int) -> None:
    """Symbolic results, with numbers substituted, equal numeric results."""
    (symbolic,) = _run(operator, host_of(left), np.asarray([right]))
    numbers = np.asarray(_evaluated(tuple(left), b=6, s=4))
    (concrete,) = _run(operator, numbers, np.asarray([right]))

    assert is_host(symbolic)
    assert dimensions_of(concrete) == tuple(_evaluated(dimensions_of(symbolic), b=6, s=4))


def test_shapes_are_taken_apart_and_put_together_without_being_computed() -> None:
    """As exporters write x.view(x.shape[0], -1): the program contains none of its operators."""

    def trace(x: jax.Array) -> jax.Array:
        (shape,) = _run("Shape", x)
        (first,) = _run("Gather", shape, np.asarray(0), axis=0)
        (unsqueezed,) = _run("Unsqueeze", first, np.asarray([0]))
        (joined,) = _run("Concat", unsqueezed, np.asarray([-1]), axis=0)
        assert is_host(joined)
        (y,) = _run("Reshape", x, joined)
        return jax.numpy.asarray(y)

    found = jax.eval_shape(trace, jax.ShapeDtypeStruct((B, 3, S), np.float32))

    assert "(b, 3*s)" == str(found.shape)
