from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st
from support.onnx_models import FLOAT, largest_difference, model, node, ours, single, theirs

RANDOM = np.random.default_rng(5)
IMAGE = {"x": RANDOM.standard_normal((2, 4, 9, 8), np.float32)}
TOLERANCE = 1e-5

PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3)).map(list)
EXAMPLES = settings(max_examples=8)


@st.composite
def windows(draw: st.DrawFn) -> dict[str, list[int]]:
    """Draw a kernel, its strides, and padding that is smaller than it."""
    kernel = draw(PAIRS)
    pads = [draw(st.integers(0, size - 1)) for size in kernel * 2]
    return {"kernel_shape": kernel, "strides": draw(PAIRS), "pads": pads}


@EXAMPLES
@given(window=windows(), ceil=st.integers(0, 1), counted=st.integers(0, 1))
def test_pooling_is_that_of_onnxruntime(
    window: dict[str, list[int]], ceil: int, counted: int
) -> None:
    plain: dict[str, Any] = {**window}
    averaged: dict[str, Any] = plain | {"count_include_pad": counted}
    for operator, attributes in (("MaxPool", plain), ("AveragePool", averaged)):
        made = single(operator, IMAGE, opset=19, ceil_mode=ceil, **attributes)

        assert largest_difference(theirs(made, IMAGE), ours(made, IMAGE)) < TOLERANCE


@EXAMPLES
@given(window=windows(), ceil=st.integers(0, 1), order=st.integers(0, 1), dilations=PAIRS)
def test_places_of_a_max_pool_are_those_of_onnxruntime(
    window: dict[str, list[int]], ceil: int, order: int, dilations: list[int]
) -> None:
    """Of equal values the first counts; indices count over batch and channels."""
    image = {"x": np.round(IMAGE["x"])}
    attributes: dict[str, Any] = {**window, "ceil_mode": ceil, "dilations": dilations}
    made = model(
        [node("MaxPool", ["x"], ["y", "places"], storage_order=order, **attributes)],
        {"x": (FLOAT, [2, 4, 9, 8])},
        ["y", "places"],
    )
    expected, found = theirs(made, image), ours(made, image)

    assert [one.dtype for one in expected] == [one.dtype for one in found]
    assert 0 == largest_difference(expected, found)


@EXAMPLES
@given(window=windows(), dilations=PAIRS, groups=st.sampled_from([1, 2, 4]))
def test_convolution_is_that_of_onnxruntime(
    window: dict[str, list[int]], dilations: list[int], groups: int
) -> None:
    kernel = window["kernel_shape"]
    forward = RANDOM.standard_normal((8, 4 // groups, *kernel), np.float32)
    backward = RANDOM.standard_normal((4, 3, *kernel), np.float32)
    for operator, weight in (("Conv", forward), ("ConvTranspose", backward)):
        attributes: dict[str, Any] = {"group": groups, "dilations": dilations, **window}
        made = single(operator, IMAGE, {"w": weight}, **attributes)

        assert largest_difference(theirs(made, IMAGE), ours(made, IMAGE)) < TOLERANCE


@EXAMPLES
@given(
    sizes=st.tuples(st.integers(2, 20), st.integers(2, 20)),
    mode=st.sampled_from(["linear", "cubic"]),
    where=st.sampled_from(["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]),
)
def test_resize_is_that_of_onnxruntime(sizes: tuple[int, int], mode: str, where: str) -> None:
    target = {"roi": np.zeros(0, np.float32), "scales": np.zeros(0, np.float32)}
    made = single(
        "Resize",
        IMAGE,
        target | {"sizes": np.asarray([2, 4, *sizes])},
        mode=mode,
        coordinate_transformation_mode=where,
    )

    assert largest_difference(theirs(made, IMAGE), ours(made, IMAGE)) < TOLERANCE
