"""A mesh never counts less than its models hold, whatever the order of evictions."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.errors import ModelNotFound
from xlaserve.residence.platforms.reported_sizes import Holding, ReportedSizes

OWN, SHARED = 10, 100

MODELS = {"a1": "a", "a2": "a", "a3": "a", "b1": "b", "b2": "b", "c1": ""}
"""Computation of each model: the first loaded model of a computation carries the shared memory.
`c1` shares nothing.
"""


class Books:
    """Models that are loaded and unloaded, and the memory that each holds."""

    def __init__(self, *, room: int = 0) -> None:
        self.loaded: list[str] = []
        self.grown: Counter[str] = Counter()
        self.room = room

    def holding(self, model: str) -> Holding:
        if model not in self.loaded:
            raise ModelNotFound(model)
        own, kind = OWN + self.grown[model], MODELS[model]
        if not kind:
            return Holding(own, own)
        carries = model == next(one for one in self.loaded if MODELS[one] == kind)
        return Holding(own + SHARED * carries, own + SHARED, kind)

    def reported(self) -> ReportedSizes:
        return ReportedSizes(self.holding, lambda: self.room)

    @property
    def total_bytes(self) -> int:
        return sum(self.holding(model).held_bytes for model in self.loaded)


@pytest.mark.parametrize("room", [0, SHARED - 1, SHARED, 2 * SHARED, 3 * SHARED])
@given(st.lists(st.sampled_from(sorted(MODELS)), max_size=30))
def test_the_mesh_counts_what_is_held_after_each_step(room: int, changes: list[str]) -> None:
    """The difference is at most `room`, also after evictions, which tell the mesh nothing new."""
    books, counted = Books(room=room), Counter[str]()
    reported = books.reported()
    for model in changes:
        if model in books.loaded:
            books.loaded.remove(model)
            del counted[model]
        else:
            books.loaded.append(model)
            counted[model] = reported.report(model)
            assert counted[model] == reported.update(model)
        assert counted.total() + room >= books.total_bytes
        assert 0 == reported.unreported_bytes()
        assert reported.exposed_bytes() <= room
        assert reported.total_bytes == counted.total()


def sizes_of(reported: ReportedSizes, books: Books, *models: str) -> list[int]:
    sizes = []
    for model in models:
        books.loaded.append(model)
        sizes.append(reported.report(model))
    return sizes


@pytest.mark.parametrize(
    ("room", "second_a", "second_b"),
    [
        (0, OWN + SHARED, OWN + SHARED),
        (SHARED - 1, OWN + SHARED, OWN + SHARED),
        (SHARED, OWN, OWN + SHARED),
        (2 * SHARED, OWN, OWN),
    ],
)
def test_a_model_is_told_with_what_another_carries_unless_there_is_room(
    room: int, second_a: int, second_b: int
) -> None:
    """The shared memory is taken from `room` once per computation."""
    books = Books(room=room)
    sizes = sizes_of(books.reported(), books, "a1", "a2", "a3", "b1", "b2")

    assert [OWN + SHARED, second_a, second_a, OWN + SHARED, second_b] == sizes


def test_room_is_free_when_the_last_has_left_that_was_told_with_less() -> None:
    books = Books(room=SHARED)
    reported = books.reported()
    sizes_of(reported, books, "a1", "a2", "b1")
    books.loaded.remove("a1")
    while_taken = reported.exposed_bytes()
    books.loaded.remove("a2")

    assert (SHARED, 0) == (while_taken, reported.exposed_bytes())
    assert [OWN] == sizes_of(reported, books, "b2")


def test_growth_is_told_with_the_next_load() -> None:
    """A model grew after its load, and there is no room to absorb it."""
    books = Books()
    reported = books.reported()
    sizes_of(reported, books, "c1")
    books.grown["c1"] = 7
    before = reported.unreported_bytes()

    assert [OWN + SHARED + 7] == sizes_of(reported, books, "a1")
    assert (7, 0, OWN) == (before, reported.unreported_bytes(), reported.update("c1"))


def test_question_for_one_that_grew_is_answered_with_that() -> None:
    """The mesh then knows the growth, and the next load reports only its own size."""
    books = Books()
    reported = books.reported()
    sizes_of(reported, books, "c1")
    books.grown["c1"] = 7

    assert (OWN + 7, 0) == (reported.update("c1"), reported.unreported_bytes())
    assert [OWN + SHARED] == sizes_of(reported, books, "a1")


def test_growth_within_the_room_is_told_to_nobody() -> None:
    books = Books(room=7)
    reported = books.reported()
    sizes_of(reported, books, "c1")
    books.grown["c1"] = 7

    assert (0, 7) == (reported.unreported_bytes(), reported.exposed_bytes())


def test_what_a_model_has_grown_by_is_told_once_when_it_is_loaded_again() -> None:
    books = Books()
    reported = books.reported()
    before = sizes_of(reported, books, "c1")
    books.grown["c1"] = 2

    assert ([OWN], OWN + 2, OWN + 2) == (before, reported.report("c1"), reported.update("c1"))


def test_size_of_nothing_is_one_byte() -> None:
    reported = ReportedSizes(lambda model: Holding(0, 0))

    assert (1, 1) == (reported.update("m"), reported.report("m"))


def test_one_that_is_not_loaded_is_not_found_and_not_counted() -> None:
    books = Books()
    reported = books.reported()
    sizes_of(reported, books, "a1")
    books.loaded.clear()
    with pytest.raises(ModelNotFound):
        reported.update("a1")

    assert 0 == reported.total_bytes
