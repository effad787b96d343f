"""The inputs of a computation that executes requests of different shapes together."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from xlaserve.errors import InvalidModel, InvalidTensor
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.text import parse_json
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.runtime.wrappers import ragged
from xlaserve.runtime.wrappers.ragged import RaggedModel
from xlaserve.tensors import DATATYPES, TensorSpec

FP32, INT32 = DATATYPES["FP32"], DATATYPES["INT32"]
KINDS = {
    "count": ("BATCH_ELEMENT_COUNT", [4]),
    "ends": ("BATCH_ACCUMULATED_ELEMENT_COUNT", [4]),
    "bounds": ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [5]),
    "most": ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [9]),
    "items": ("BATCH_ITEM_SHAPE", [4, 2]),
    "flat": ("BATCH_ITEM_SHAPE_FLATTEN", [8]),
}


class Computation:
    """Records its inputs."""

    replicas = 1
    on_demand = None

    def __init__(self, rows: int = 4, scattered: int = 12) -> None:
        inputs = [TensorSpec("x", FP32, (12,))]
        inputs += [TensorSpec(name, INT32, tuple(shape)) for name, (_, shape) in KINDS.items()]
        outputs = TensorSpec("y", FP32, (rows, 1)), TensorSpec("z", FP32, (scattered,))
        self.info = ModelInfo("fake", tuple(inputs), outputs, 0)
        self.given: Mapping[str, Any] = {}

    def execute(self, inputs: Any, *, resident: bool = False, replica: int = 0) -> Any:
        self.given = {name: value.tolist() for name, value in inputs.items()}
        return {"y": inputs["count"][:, None].astype(np.float32), "z": inputs["x"]}


def config(**other: Any) -> ModelConfig:
    tensor = {"name": "x", "data_type": "TYPE_FP32", "dims": [-1, -1], "allow_ragged_batch": True}
    made: dict[str, Any] = {
        "max_batch_size": 4,
        "input": [tensor],
        "output": [
            {"name": "y", "data_type": "TYPE_FP32", "dims": [1]},
            {"name": "z", "data_type": "TYPE_FP32", "dims": [-1, -1]},
        ],
        "batch_input": [
            {"kind": kind, "target_name": [name], "data_type": "TYPE_INT32", "source_input": ["x"]}
            for name, (kind, _) in KINDS.items()
        ],
        "batch_output": [{"target_name": ["z"], "source_input": ["x"]}],
        "parameters": {"batch_independent": {"string_value": "true"}},
    }
    return parse_json(json.dumps(made | other))


def model(computation: Any, **other: Any) -> RaggedModel:
    return ragged.wrap("m", computation, config(**other))


def x(*shape: int) -> Any:
    return {"x": np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(1, *shape)}


def test_what_is_left_is_a_request_of_zeros() -> None:
    computation = Computation()

    found = model(computation).together([x(2, 2), x(1, 3)])

    given = computation.given
    assert [1, 2, 3, 4, 1, 2, 3, 0, 0, 0, 0, 0] == given["x"]
    assert [4, 3, 5, 0] == given["count"]
    assert [4, 7, 12, 12] == given["ends"]
    assert [0, 4, 7, 12, 12] == given["bounds"]
    assert 9 == len(given["most"])
    assert [[2, 2], [1, 3], [5, 1], [0, 1]] == given["items"]
    assert [2, 2, 1, 3, 5, 1, 0, 1] == given["flat"]
    assert [[[4.0]], [[3.0]]] == [part.tolist() for part in found["y"].parts]
    assert [[[[1, 2], [3, 4]]], [[[1, 2, 3]]]] == [part.tolist() for part in found["z"].parts]


def test_requests_that_leave_nothing_need_no_other() -> None:
    computation = Computation()
    requests = [x(3, 1)] * 4

    assert 4 == model(computation).fitting(requests)
    model(computation).together(requests)
    assert [3, 3, 3, 3] == computation.given["count"]


@pytest.mark.parametrize(
    ("sizes", "count"),
    [([1, 1, 1, 1], 3), ([9, 3], 2), ([9, 4], 1), ([4, 4, 4], 3), ([3, 3, 3, 2, 1], 3)],
)
def test_what_fits_leaves_a_place_for_what_is_left(sizes: list[int], count: int) -> None:
    assert count == model(Computation()).fitting([x(1, size) for size in sizes])


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (x(2, 5), "expected at most 9 elements, got"),
        (
            {"x": np.zeros((2, 1, 1), np.float32)},
            "expected one row, since requests have different shapes",
        ),
    ],
)
def test_a_request_that_has_no_room_is_refused(inputs: Any, text: str) -> None:
    with pytest.raises(InvalidTensor, match=text):
        model(Computation()).check(inputs)


@pytest.mark.parametrize(
    ("computation", "text"),
    [
        (Computation(rows=3), "expected the same number of requests in all tensors"),
        (Computation(scattered=11), "batch_output 'z': expected the shape of input 'x'"),
        (Computation(rows=-1), "expected fixed shapes"),
    ],
)
def test_a_computation_of_other_shapes_is_refused(computation: Any, text: str) -> None:
    with pytest.raises(InvalidModel, match=text):
        model(computation)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"max_batch_size": 0}, "expected a max_batch_size above 0"),
        ({"output": []}, "expected the inputs and outputs"),
        ({"sequence_batching": {}}, "neither sequence_batching nor reshape"),
        (
            {"parameters": {"batch_independent": {"string_value": "false"}}},
            "'batch_independent' to be true",
        ),
    ],
)
def test_a_configuration_that_cannot_be_obeyed_is_refused(other: Any, text: str) -> None:
    with pytest.raises(InvalidModel, match=text):
        ragged.inner(config(**other))
