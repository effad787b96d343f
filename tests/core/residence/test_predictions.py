"""Measured sizes of loads, and the predictions derived from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.errors import InvalidModel
from xlaserve.residence.platforms.predictions import FileReader, FilesSeen, Predictions


def test_the_last_need_counts_under_every_name() -> None:
    predictions = Predictions(10)
    predictions.note_request("m", "remote")
    for size in (5, 3):
        predictions.remember("m", size, "files", "computation")
    known = [predictions.of_key(key) for key in ("files", "computation", "remote")]

    assert (3, [3] * 3) == (predictions.of_id("m"), known)
    assert (None, None) == (predictions.of_id("files"), predictions.of_key("m"))
    assert 3 == predictions.of_key("unknown", "files")


def test_what_is_remembered_is_bounded_and_the_least_used_goes_first() -> None:
    predictions = Predictions(2)
    for size, name in enumerate("abc", start=1):
        predictions.remember(name, size, f"files of {name}")
        predictions.of_id("a")

    assert [1, None, 3] == [predictions.of_id(name) for name in "abc"]

    for index in range(10):
        predictions.remember("c", 3, index)

    assert [None, None, 3] == [predictions.of_key(key) for key in ("files of a", 3, 4)]


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 1000)), max_size=40))
def test_nine_of_ten_models_need_no_more_than_what_is_typical(
    loads: list[tuple[int, int]],
) -> None:
    """Each model counts once, with its last load; forgotten models do not count."""
    predictions = Predictions(5)
    kept: dict[int, int] = {}
    for model, size in loads:
        kept.pop(model, None)
        kept[model] = size
        if len(kept) > 5:
            del kept[next(iter(kept))]
        predictions.remember(str(model), size)
    typical, sizes = predictions.typical_bytes, sorted(kept.values())

    assert (sizes[-1] if sizes else 0) == predictions.largest_bytes
    if typical is None:
        assert not sizes
    else:
        assert sum(size <= typical for size in sizes) >= 0.9 * len(sizes)
        assert sum(size < typical for size in sizes) < 0.9 * len(sizes)


def test_what_was_refused_says_nothing_of_others() -> None:
    """Otherwise one model larger than the device would keep every new model from loading."""
    predictions = Predictions(10)
    predictions.remember("giant", 1000, "files", refused=True)

    assert (1000, 1000) == (predictions.of_id("giant"), predictions.of_key("files"))
    assert (None, 0) == (predictions.typical_bytes, predictions.largest_bytes)

    predictions.remember("giant", 900)

    assert (900, 900) == (predictions.typical_bytes, predictions.largest_bytes)


def test_what_is_forgotten_is_known_by_no_name() -> None:
    predictions = Predictions(10)
    predictions.note_request("m", "remote")
    predictions.remember("m", 5, "files")
    predictions.forget("m", "files")
    predictions.forget("never heard of")

    assert [None] * 3 == [predictions.of_id("m"), *map(predictions.of_key, ("files", "remote"))]
    assert predictions.typical_bytes is None


@pytest.mark.parametrize("name", ["x" * 1_000_000, "\udcff", "é"])
def test_any_name_is_remembered(name: str) -> None:
    predictions = Predictions(2)
    predictions.remember(name, 7, name)

    assert (7, 7) == (predictions.of_id(name), predictions.of_key(name))


@pytest.mark.parametrize("error", [OSError("gone"), InvalidModel("no"), RuntimeError("a fault")])
async def test_files_that_cannot_be_looked_at_are_as_good_as_not_there(error: Exception) -> None:
    """Whatever the error, the load continues without a prediction, and the next look is made."""

    def fail() -> FilesSeen:
        raise error

    look = FileReader()
    seen = FilesSeen(7, "key")
    answers = [await look(fail), await look(lambda: seen)]
    look.close()

    assert [None, seen] == answers
