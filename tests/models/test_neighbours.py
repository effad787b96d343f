"""The trial that compares rows alone with rows in a batch."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from xlaserve.row_proofs.neighbours import Difference, find_difference
from xlaserve.tensors import Tensor, TensorSpec, datatype_named

Function = Callable[[Tensor], Tensor]


def trial(function: Function, datatype: str = "FP32", seeds: Sequence[int] = (0,)) -> str:
    """Try a function of FP32[-1,3] or another datatype; return the difference found, or ""."""
    given = TensorSpec("x", datatype_named(datatype), (-1, 3))
    made = function(np.ones((1, 3), given.datatype.dtype))
    name = {"f": "FP32", "i": "INT64", "u": "INT64", "b": "BOOL"}[made.dtype.kind]
    returned = TensorSpec("y", datatype_named(name), (-1, 3))
    with np.errstate(all="ignore"):
        found = find_difference(
            lambda tensors: [function(tensors[0])], [given], [returned], seeds=seeds
        )
    return "" if found is None else str(found)


def position(x: Tensor) -> Tensor:
    return x + np.arange(len(x), dtype=np.float32)[:, None]


def is_first_nan(x: Tensor) -> Tensor:
    return x + np.float32(np.isnan(x).any())


def is_large(x: Tensor) -> Tensor:
    largest = np.float32(np.nan if abs(x).max() > 100 else np.inf)
    return np.minimum(x, largest)


def repeated(x: Tensor) -> Tensor:
    """Return whether two rows are equal."""
    return x + np.float32(len(np.unique(x, axis=0)) < len(x))


def is_behind_large(x: Tensor) -> Tensor:
    """Depend on rows that come before, but not on rows that come after."""
    seen = np.maximum.accumulate(abs(x).max(axis=1, keepdims=True), axis=0) > 100
    return x + np.roll(seen, 1, axis=0) * (np.arange(len(x))[:, None] > 0).astype(np.float32)


HAZARDS: dict[str, Function] = {
    "by the largest": lambda x: x / abs(x).max(),
    "places": position,
    "running sum": lambda x: np.cumsum(x, 0),
    "running sum from the end": lambda x: np.cumsum(x[::-1], 0)[::-1],
    "mean": lambda x: x - x.mean(0),
    "size": lambda x: x / len(x),
    "first row": lambda x: x + x[:1],
    "last row": lambda x: x + x[-1:],
    "sorted": lambda x: np.sort(x, 0),
    "eight rows": lambda x: x * (len(x) < 8),
    "noise": lambda x: x + np.random.default_rng(0).standard_normal(x.shape, np.float32),
    "only beside NaN": is_first_nan,
    "only beside large ones": is_large,
    "only behind large ones": is_behind_large,
    "only beside its like": repeated,
    "only beside tiny ones": lambda x: x + np.float32(abs(x).sum(axis=1).min() < 0.01),
}


@pytest.mark.parametrize("name", HAZARDS)
def test_rows_that_see_one_another_are_found_out(name: str) -> None:
    assert "output 'y' of a row changes" in trial(HAZARDS[name])


@pytest.mark.parametrize("datatype", ["INT32", "UINT8", "INT64", "UINT64", "BOOL"])
def test_whole_numbers_and_truths_are_tried_as_well(datatype: str) -> None:
    mixed = trial(lambda x: (x + x.max(axis=0, keepdims=True)).astype(np.int64), datatype)
    honest = trial(lambda x: (x * 2).astype(np.int64), datatype)

    assert "output 'y' of a row changes" in mixed
    assert not honest


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: x - x.mean(1, keepdims=True),
        lambda x: np.cumsum(x, 1),
        lambda x: x @ np.arange(9, dtype=np.float32).reshape(3, 3),
    ],
)
def test_rows_by_themselves_pass(function: Function) -> None:
    assert not trial(function, seeds=(0, 1))


def test_difference_says_what_was_beside_the_row() -> None:
    found = Difference("y", 4, "before rows of NaN", 2.5)

    text = "output 'y' of a row changes by up to 2.5 in a batch of 4, before rows of NaN"
    assert text == str(found)


def test_every_size_is_run_and_no_other() -> None:
    """Each size costs a compilation."""
    seen = set()

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        seen.add(len(tensors[0]))
        return tensors

    spec = TensorSpec("x", datatype_named("FP32"), (-1, 2))

    assert find_difference(run, [spec], [spec]) is None
    assert {1, 3, 4, 8} == seen
