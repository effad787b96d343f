"""What a mesh counts is never less than what its models hold, whatever leaves first."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.core.residence.told_sizes import ToldSizes
from xlaserve.errors import ModelNotFound

OWN, SHARED = 10, 100

MODELS = {"a1": "a", "a2": "a", "a3": "a", "b1": "b", "b2": "b"}
"""Models by their computation: the first of one that is loaded carries what they share."""


class Books:
    """Models that come and go, and what each of them holds."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def held_bytes(self, model: str) -> int:
        if model not in self.loaded:
            raise ModelNotFound(model)
        first = next(one for one in self.loaded if MODELS[one] == MODELS[model])
        return OWN + SHARED * (first == model)

    @property
    def total_bytes(self) -> int:
        return sum(map(self.held_bytes, self.loaded))


@given(st.lists(st.sampled_from(sorted(MODELS)), max_size=30))
def test_after_a_load_the_mesh_counts_what_is_held(changes: list[str]) -> None:
    books, counted = Books(), Counter[str]()
    told = ToldSizes(books.held_bytes)
    for model in changes:
        if model in books.loaded:
            books.loaded.remove(model)
            del counted[model]
            continue
        predicted = OWN + told.untold_bytes()
        books.loaded.append(model)
        counted[model] = told.tell(model)

        assert counted.total() >= books.total_bytes
        assert counted[model] == told.told(model)
        assert counted[model] in (predicted, predicted + SHARED)


def test_next_load_brings_what_an_heir_carries() -> None:
    books = Books()
    told = ToldSizes(books.held_bytes)
    sizes = []
    for model in ("a1", "a2"):
        books.loaded.append(model)
        sizes.append(told.tell(model))
    books.loaded.remove("a1")
    sizes.append(told.untold_bytes())
    books.loaded.append("a3")
    sizes += [told.tell("a3"), told.untold_bytes()]

    assert [OWN + SHARED, OWN, SHARED, OWN + SHARED, 0] == sizes
    assert OWN == told.told("a2")


def test_question_for_an_heir_is_answered_with_what_it_carries() -> None:
    """Then the mesh knows, and the next load brings nothing besides itself."""
    books = Books()
    told = ToldSizes(books.held_bytes)
    for model in ("a1", "a2"):
        books.loaded.append(model)
        told.tell(model)
    books.loaded.remove("a1")

    assert (OWN + SHARED, 0) == (told.told("a2"), told.untold_bytes())
    books.loaded.append("a3")
    assert (OWN, OWN + SHARED) == (told.tell("a3"), told.told("a2"))


def test_one_is_told_as_no_less_than_it_holds() -> None:
    """Also where the mesh counts too much: what was told for heirs that have left as well."""
    books = Books()
    told = ToldSizes(books.held_bytes)
    for leaving, model in (("", "a1"), ("", "a2"), ("a1", "b1")):
        books.loaded = [one for one in books.loaded if one != leaving] + [model]
        told.tell(model)
    books.loaded = ["b1", "b2"]

    assert (OWN, 0) == (told.tell("b2"), told.untold_bytes())


def test_what_a_model_has_grown_by_is_told_once_when_it_is_loaded_again() -> None:
    sizes = {"m": 7}
    told = ToldSizes(sizes.__getitem__)
    before = told.tell("m")
    sizes["m"] = 9

    assert (7, 9, 9) == (before, told.tell("m"), told.told("m"))


def test_size_of_nothing_is_one_byte() -> None:
    told = ToldSizes({"m": 0}.__getitem__)

    assert (1, 1) == (told.told("m"), told.tell("m"))


def test_one_that_is_not_loaded_is_not_found() -> None:
    with pytest.raises(ModelNotFound):
        ToldSizes(Books().held_bytes).told("a1")
