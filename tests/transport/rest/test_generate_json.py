"""JSON of the generate extension: the shapes of fields, and the form of outputs."""

import json
from typing import Any

import numpy as np
import pytest

from xlaserve.errors import InvalidTensor, OutputNotInForm, OutputNotText
from xlaserve.http.json.json_tensors import DEFAULT_RULES, JsonRules
from xlaserve.http.v2.generate_json import read_generate_request, write_generate_answer
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.inference import InferOutput, InferResponse
from xlaserve.tensors import TensorSpec, datatype_named

FP32, BYTES = datatype_named("FP32"), datatype_named("BYTES")


def read(shape: tuple[int, ...], value: Any, *, rows: int = 0, datatype: Any = FP32) -> Any:
    info = ModelInfo("p", (TensorSpec("x", datatype, shape),), (), rows)
    text = json.dumps({"x": value}, indent=1).encode()
    (tensor,) = read_generate_request(info, "m", "", memoryview(text), max_depth=50).inputs
    return tensor.data.shape


@pytest.mark.parametrize(
    ("shape", "value", "expected"),
    [
        ((), 1, ()),
        ((1,), 1, (1,)),
        ((-1,), 1, (1,)),
        ((-1,), [1, 2], (2,)),
        ((2, 3), [1, 2, 3, 4, 5, 6], (2, 3)),
        ((2, -1), [1, 2, 3, 4], (2, 2)),
        ((2, -1), [[1, 2], [3, 4]], (2, 2)),
        ((-1, -1), [[1, 2, 3], [4, 5, 6]], (2, 3)),
        ((-1, 2), [], (0, 2)),
        ((-1, -1), [[]], (1, 0)),
    ],
)
def test_a_list_has_the_shape_of_the_input(
    shape: tuple[int, ...], value: Any, expected: tuple[int, ...]
) -> None:
    assert expected == read(shape, value)


@pytest.mark.parametrize(
    ("shape", "value", "expected"),
    [
        ((-1, 1), 1, (1, 1)),
        ((-1, 2), [1, 2], (1, 2)),
        ((-1, -1), [1, 2, 3], (1, 3)),
        ((-1, 2), [[1, 2], [3, 4]], (2, 2)),
        ((-1, 2, 2), [1, 2, 3, 4], (1, 2, 2)),
        ((-1, 2, 2), [[1, 2], [3, 4]], (1, 2, 2)),
        ((-1,), 1, (1,)),
    ],
)
def test_a_batch_has_one_row_unless_its_lists_say_otherwise(
    shape: tuple[int, ...], value: Any, expected: tuple[int, ...]
) -> None:
    assert expected == read(shape, value, rows=4)


def test_brackets_and_commas_within_strings_do_not_count() -> None:
    assert (1, 2) == read((-1, -1), ["a],[", 'b"\\,['], rows=4, datatype=BYTES)


@pytest.mark.parametrize(
    ("shape", "value", "text"),
    [
        ((2, 3), [1, 2], "expected 6 elements for FP32"),
        ((2, -1), [1, 2, 3], "elements for FP32"),
        ((-1, -1), [1, 2], "which has several open ones, got 1 levels of lists"),
        (
            (-1,),
            [[1, 2], [3]],
            "data in one list, or in nested lists of equal length on each level",
        ),
        ((-1,), [1, "a"], "elements of FP32, got str"),
        ((-1,), {"a": [1]}, "expected elements of FP32"),
    ],
)
def test_what_has_no_shape_is_refused(shape: tuple[int, ...], value: Any, text: str) -> None:
    with pytest.raises(InvalidTensor, match=text):
        read(shape, value)


def written(data: Any, datatype: str, rules: JsonRules = DEFAULT_RULES) -> Any:
    output = InferOutput("y", datatype_named(datatype), data)
    answer = write_generate_answer(InferResponse("m", "1", "", (output,)), rules)
    return json.loads(b"".join(answer.parts))["y"]


def test_one_element_is_no_list() -> None:
    """Whatever the number of its dimensions."""
    assert 7 == written(np.full((1, 1, 1), 7), "INT64")
    assert "a]" == written(np.array([[b"a]"]], dtype=object), "BYTES")
    assert [1, 2] == written(np.array([[1], [2]]), "INT64")
    assert [] == written(np.zeros((0, 3)), "FP64")
    assert list(range(40_000)) == written(np.arange(40_000), "INT64")


def test_what_json_cannot_hold_is_refused() -> None:
    assert np.isnan(written(np.array([np.nan]), "FP64"))
    with pytest.raises(OutputNotInForm, match="cannot hold NaN or Infinity, use V2$"):
        written(np.array([np.nan]), "FP64", JsonRules(strict=True))
    with pytest.raises(OutputNotText, match="output 'y': expected UTF-8"):
        written(np.array([b"\xff"], np.object_), "BYTES")
    with pytest.raises(InvalidTensor, match="FP16"):
        written(np.zeros(1, np.float16), "FP16")
