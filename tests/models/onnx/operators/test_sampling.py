"""Grid sampling, RoI pooling and other interpolation, compared with onnxruntime."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from support.onnx_models import (
    Inputs,
    exported,
    largest_difference,
    model,
    node,
    ours,
    single,
    theirs,
)

from xlaserve.errors import InvalidModel
from xlaserve.tensors import Tensor

RANDOM = np.random.default_rng(7)
FLOAT = 1
TOLERANCE = 1e-5


def _normal(*shape: int) -> Tensor:
    return RANDOM.standard_normal(shape, np.float32)


FLAT = {"x": _normal(2, 3, 5, 4), "grid": 1.6 * _normal(2, 3, 2, 2)}
SOLID = {"x": _normal(1, 2, 3, 4, 5), "grid": 1.6 * _normal(1, 2, 3, 2, 3)}
"""Many coordinates lie outside of [-1, 1], some by several times."""


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_a_grid_is_sampled_as_onnxruntime_does(padding: str) -> None:
    for given, mode, corners in (
        (FLAT, "linear", 0),
        (FLAT, "linear", 1),
        (FLAT, "cubic", 0),
        (FLAT, "nearest", 1),
        (SOLID, "linear", 1),
        (SOLID, "nearest", 0),
    ):
        attributes: dict[str, Any] = {"padding_mode": padding, "align_corners": corners}
        made = single("GridSample", given, opset=20, mode=mode, **attributes)

        difference = largest_difference(theirs(made, given), ours(made, given))

        assert difference < TOLERANCE, (mode, attributes, difference)


def test_a_mode_of_a_grid_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidModel, match="GridSample.*mode of bicubic, bilinear.*got lanczos"):
        ours(single("GridSample", FLAT, opset=20, mode="lanczos"), FLAT)


ROIS: dict[str, Tensor] = {
    "x": _normal(2, 3, 9, 8),
    "rois": np.asarray([[0.3, 0.7, 6.4, 7.9], [-2, -1.5, 3, 4], [5, 5, 5.2, 12]], np.float32),
    "rows": np.asarray([1, 0, 1], np.int64),
}


@pytest.mark.parametrize("shift", ["half_pixel", "output_half_pixel"])
def test_regions_are_aligned_as_onnxruntime_does(shift: str) -> None:
    attributes: dict[str, Any] = {"output_height": 3, "output_width": 2, "sampling_ratio": 2}
    made = single(
        *("RoiAlign", ROIS),
        opset=16,
        spatial_scale=0.9,
        coordinate_transformation_mode=shift,
        **attributes,
    )

    assert largest_difference(theirs(made, ROIS), ours(made, ROIS)) < TOLERANCE


def test_as_many_samples_of_a_region_as_the_data_wants_are_refused() -> None:
    with pytest.raises(InvalidModel, match="RoiAlign.*sampling_ratio 0.*depends on data"):
        ours(single("RoiAlign", ROIS, opset=16), ROIS)


def test_the_largest_pixels_of_regions_are_those_of_onnxruntime() -> None:
    boxes = np.asarray([[1, 0, 0, 7, 8], [0, 2, 3, 2, 3], [1, 3, 2, 13, 15]], np.float32)
    given = {"x": ROIS["x"], "rois": boxes}
    made = single("MaxRoiPool", given, opset=16, pooled_shape=[3, 2], spatial_scale=0.7)

    assert largest_difference(theirs(made, given), ours(made, given)) < TOLERANCE


def test_a_deformed_convolution_is_that_of_onnxruntime() -> None:
    given = {
        "x": _normal(2, 4, 7, 6),
        "w": _normal(6, 2, 3, 2),
        "offset": _normal(2, 2 * 2 * 6, 4, 6),
        "bias": _normal(6),
        "mask": _normal(2, 2 * 6, 4, 6),
    }
    made = single(
        *("DeformConv", given),
        opset=19,
        group=2,
        offset_group=2,
        strides=[2, 1],
        pads=[1, 0, 2, 2],
        dilations=[1, 2],
    )

    assert largest_difference(theirs(made, given), ours(made, given)) < TOLERANCE


def test_grids_and_deformed_convolutions_take_any_batch() -> None:
    weights = {"w": _normal(2, 3, 2, 2), "size": np.asarray([2, 3, 4, 3])}
    nodes = [
        node("AffineGrid", ["theta", "size"], ["grid"]),
        node("GridSample", ["x", "grid"], ["y"]),
        node("DeformConv", ["x", "w", "offset"], ["z"]),
    ]
    inputs: Inputs = {
        "x": (FLOAT, ["N", 3, 5, 4]),
        "theta": (FLOAT, ["N", 2, 3]),
        "offset": (FLOAT, ["N", 8, 4, 3]),
    }
    made = model(nodes, inputs, ["y", "z"], weights, opset=20)
    run = exported(made, "b", {"x": "b,3,5,4", "theta": "b,2,3", "offset": "b,8,4,3"})
    given = {"x": _normal(2, 3, 5, 4), "theta": _normal(2, 2, 3), "offset": _normal(2, 8, 4, 3)}

    assert largest_difference(theirs(made, given), run(given)) < TOLERANCE
