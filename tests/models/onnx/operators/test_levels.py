"""Products of 8-bit integers are exact: compared with sums in INT64."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Iterable
from itertools import product
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.onnx_cases import compute

from xlaserve.authoring.cpu.optimizing import optimize
from xlaserve.importers.onnx import planning, reading
from xlaserve.importers.onnx.graph import Graph
from xlaserve.tensors import Tensor

KINDS = {np.dtype(np.uint8): TensorProto.UINT8, np.dtype(np.int8): TensorProto.INT8}
RANDOM = np.random.default_rng(7)


def extremes(shape: tuple[int, ...], dtype: type) -> Tensor:
    """Return values at and near the ends of the range, so that sums are large and odd."""
    limits = np.iinfo(dtype)
    ends = [limits.min, limits.min + 1, limits.max - 1, limits.max, limits.max, limits.max]
    return RANDOM.choice(ends, shape).astype(dtype)


def computed(operator: str, values: list[Tensor | None], **attributes: Any) -> Tensor:
    """Return the output of a node."""
    return compute(*graph_of(operator, values, **attributes))["y"]


def graph_of(
    operator: str, values: list[Tensor | None], **attributes: Any
) -> tuple[Graph, dict[str, Tensor]]:
    """Return a graph of one node and its inputs: two operands; zero points are constants."""
    names = ["x", "w", "x_zero", "w_zero"]
    given = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    node = helper.make_node(operator, [n if n in given else "" for n in names], ["y"], **attributes)
    inputs = [
        helper.make_tensor_value_info(name, KINDS[given[name].dtype], given[name].shape)
        for name in names[:2]
    ]
    constants = [onnx.numpy_helper.from_array(given[n], n) for n in names[2:] if n in given]
    outputs = [helper.make_empty_tensor_value_info("y")]
    graph = helper.make_graph([node], "test", inputs, outputs, constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    data = reading.parse(made.SerializeToString())
    return data.graph, {name: given[name] for name in names[:2]}


def less(levels: Tensor, zero: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    wide = levels.astype(np.int64)
    return wide if zero is None else wide - zero.astype(np.int64).reshape(shape)


TYPES = list(product([np.uint8, np.int8], repeat=2))
ZEROS = ("none", "one", "each")


def combinations(cases: Iterable[str]) -> list[Any]:
    """Return each case with all types and zero points.

    Every other one is slow: each half has each case, pair of types and kind of zero points with
    one another.
    """
    found = product(enumerate(cases), enumerate(TYPES), enumerate(ZEROS))
    return [
        pytest.param(case, *types, zeros, marks=[pytest.mark.slow] * ((i + j + k) % 2))
        for (i, case), (j, types), (k, zeros) in found
    ]


MATRICES = {
    "more than are exact": ((3, 2000), (2000, 4)),
    "a batch by one": ((2, 3, 70), (70, 4)),
    "one by a batch": ((3, 5), (2, 5, 4)),
    "batches": ((2, 1, 3, 5), (6, 5, 4)),
}


@pytest.mark.parametrize(("case", "left", "right", "zeros"), combinations(MATRICES))
def test_matrices_of_levels(case: str, left: type, right: type, zeros: str) -> None:
    x, w = MATRICES[case]
    a, b = extremes(x, left), extremes(w, right)
    a_zero = {"none": None, "one": extremes((), left), "each": extremes(x[-2:-1], left)}[zeros]
    b_zero = {"none": None, "one": extremes((), right), "each": extremes(w[-1:], right)}[zeros]
    column, row = (-1, 1) if zeros == "each" else (), (1, -1) if zeros == "each" else ()
    expected = less(a, a_zero, column) @ less(b, b_zero, row)

    found = computed("MatMulInteger", [a, b, a_zero, b_zero])

    assert np.dtype(np.int32) == found.dtype
    assert expected.tolist() == found.tolist()


CONVOLUTIONS = {
    "one part": ((2, 3, 6, 5), (4, 3, 3, 3), 1),
    "several parts": ((1, 70, 5, 5), (4, 70, 3, 3), 1),
    "as many parts as channels": ((1, 3, 18, 18), (2, 3, 16, 16), 1),
    "more places than are exact": ((1, 2, 24, 24), (2, 2, 24, 24), 1),
    "each channel alone": ((2, 6, 5, 5), (6, 1, 3, 3), 6),
    "groups of a few": ((1, 8, 5, 5), (4, 4, 3, 3), 2),
    "groups of many": ((1, 140, 4, 4), (4, 70, 3, 3), 2),
}


@pytest.mark.parametrize(("case", "left", "right", "zeros"), combinations(CONVOLUTIONS))
def test_convolutions_of_levels(case: str, left: type, right: type, zeros: str) -> None:
    image, kernel, groups = CONVOLUTIONS[case]
    x, w = extremes(image, left), extremes(kernel, right)
    x_zero = None if zeros == "none" else extremes((), left)
    w_zero = {"none": None, "one": extremes((), right), "each": extremes(kernel[:1], right)}[zeros]
    filters = (-1, 1, 1, 1) if zeros == "each" else ()
    padded = np.pad(less(x, x_zero, ()), [(0, 0), (0, 0), (1, 0), (0, 1)])
    expected = convolved(padded, less(w, w_zero, filters), groups)

    found = computed("ConvInteger", [x, w, x_zero, w_zero], pads=[1, 0, 0, 1], group=groups)

    assert np.dtype(np.int32) == found.dtype
    assert expected.tolist() == found.tolist()


@pytest.mark.parametrize("least", [-128, 100])
def test_sums_of_an_import_are_exact(least: int) -> None:
    """With as many channels as one part has: Winograd's form would multiply sums."""
    x = RANDOM.integers(least, 128, (1, 112, 16, 16), np.int8)
    w = RANDOM.integers(least, 128, (128, 112, 3, 3), np.int8)
    expected = convolved(x.astype(np.int64), w.astype(np.int64), 1)
    graph, given = graph_of("ConvInteger", [x, w, None, None])
    plan = planning.plan(
        graph, {n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in given.items()}
    )

    found = jax.jit(optimize(plan))(plan.parameters, given)["y"]

    assert expected.tolist() == np.asarray(found).tolist()


def convolved(image: Tensor, kernel: Tensor, groups: int) -> Tensor:
    """Convolve [N,C,H,W] with [M,C/groups,h,w] by its definition."""
    windows = np.lib.stride_tricks.sliding_window_view(image, kernel.shape[2:], axis=(2, 3))
    parts = [
        np.einsum("nchwij,mcij->nmhw", *pair)
        for pair in zip(
            np.split(windows, groups, axis=1), np.split(kernel, groups, axis=0), strict=True
        )
    ]
    return np.concatenate(parts, axis=1)
