import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.errors import InvalidTensor
from xlaserve.serving.inference import InferOutput
from xlaserve.serving.inputs.classification import (
    MOST_CLASSES,
    MOST_ELEMENTS,
    check_classes,
    classified,
)
from xlaserve.tensors import BYTES, DATATYPES, Tensor, TensorSpec, datatype_of

LABELS = (b"cat", b"dog")


def output(array: Tensor) -> InferOutput:
    datatype = datatype_of(array.dtype)
    assert datatype is not None
    return InferOutput("y", datatype, array)


def classes(array: Tensor, count: int, *, batched: bool = False) -> object:
    found = classified("m", output(array), count, LABELS, batched=batched)

    assert BYTES is found.datatype
    return found.data.tolist()


def test_the_best_come_first_with_their_labels() -> None:
    scores = np.array([0.25, 0.5, 0.125], np.float32)

    assert [b"0.500000:1:dog", b"0.250000:0:cat", b"0.125000:2"] == classes(scores, 9)
    assert [b"0.500000:1:dog"] == classes(scores, 1)


def test_each_row_of_a_batch_has_its_own() -> None:
    scores = np.array([[[1], [2]], [[4], [3]]], np.int32)

    assert [[b"2:1:dog"], [b"4:0:cat"]] == classes(scores, 1, batched=True)
    assert [b"4:2", b"3:3"] == classes(scores, 2)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (np.array([1, 1, 1], np.uint8), [b"1:0:cat", b"1:1:dog"]),
        (np.array([0, 2**64 - 1], np.uint64), [b"18446744073709551615:1:dog", b"0:0:cat"]),
        (np.array([-(2**63), 5], np.int64), [b"5:1:dog", b"-9223372036854775808:0:cat"]),
        (np.array([np.nan, -np.inf, 1], np.float64), [b"1.000000:2", b"nan:0:cat"]),
        (np.array([1.5, 2], ml_dtypes.bfloat16), [b"2.000000:1:dog", b"1.500000:0:cat"]),
        (np.array(3.0, np.float32), [b"3.000000:0:cat"]),
        (np.zeros((0, 4), np.float32), []),
    ],
)
def test_scores_of_any_kind(scores: Tensor, expected: list[bytes]) -> None:
    assert expected == classes(scores, 2)


def test_no_rows_have_no_classes() -> None:
    found = classified("m", output(np.zeros((0, 4), np.float32)), 2, (), batched=True)

    assert (0, 0) == found.data.shape


@given(st.lists(st.floats(width=32), min_size=1, max_size=300), st.integers(1, 40))
def test_they_are_those_of_a_whole_sort(numbers: list[float], count: int) -> None:
    scores = np.array(numbers, np.float32)
    known = [float("-inf") if np.isnan(number) else number for number in scores.tolist()]
    order = sorted(range(len(known)), key=lambda index: (-known[index], index))
    found = classified("m", output(scores), count, (), batched=False).data.tolist()

    assert order[:count] == [int(text.split(b":")[1]) for text in found]


@pytest.mark.parametrize(
    ("elements", "count", "expected"),
    [
        (MOST_ELEMENTS + 1, 1, f"at most {MOST_ELEMENTS} elements for a classification, got"),
        (MOST_CLASSES + 1, MOST_CLASSES + 1, f"at most {MOST_CLASSES} classes for a classific"),
    ],
)
def test_the_event_loop_does_no_more_than_so_much(elements: int, count: int, expected: str) -> None:
    with pytest.raises(InvalidTensor, match=f"model 'm', output 'y': expected {expected}"):
        classes(np.zeros(elements, np.int8), count)


@pytest.mark.parametrize("name", ["BYTES", "BOOL"])
def test_what_has_no_order_has_no_classes(name: str) -> None:
    with pytest.raises(InvalidTensor, match=f"expected numbers to be classified, got {name}"):
        check_classes("m", TensorSpec("y", DATATYPES[name], (2,)))
