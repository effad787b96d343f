"""Figures for each part of the soak test's memory, and how much each may grow."""

from typing import Any

import pytest

from acceptance.everything import Sample, _judge_booked, _judge_growth, _of_children
from acceptance.figures import MIB, Outcome

COUNT = 100
LOADED, COMPLETE = "model loaded", "background compilation finished"


def sample(at: int, **more: Any) -> Sample:
    known: dict[str, Any] = {
        "seconds": float(at),
        "memory_bytes": 400 * MIB,
        "children": {},
        "files": 60,
        "threads": 30,
        "held_bytes": 0.0,
        "booked_bytes": 0.0,
        "booked": {},
    }
    return Sample(**known | more)


@pytest.mark.parametrize(("grown", "failing"), [(25, []), (27, ["memory in the second half"])])
def test_memory_may_grow_by_what_is_kept_before_a_trim(grown: int, failing: list[str]) -> None:
    outcome = Outcome()
    sizes = [400 * MIB + (at >= COUNT - 20) * grown * MIB for at in range(COUNT)]

    _judge_growth([sample(at, memory_bytes=size) for at, size in enumerate(sizes)], 10, 16, outcome)

    assert failing == outcome.failing


def test_processes_of_trials_are_no_memory_of_the_server() -> None:
    trials = [{"trial": [180 * MIB] * (at % 3), "template": [20 * MIB]} for at in range(COUNT)]

    found = _of_children([sample(at, children=one) for at, one in enumerate(trials)])

    assert {"trial": "at most 2, of 180 MiB", "template": "at most 1, of 20 MiB"} == found


def judged(booked: list[int], *records: tuple[str, int]) -> Outcome:
    outcome = Outcome()
    samples = [sample(at, booked={"m": size}) for at, size in enumerate(booked)]
    said = [{"event": event, "model": "m", "size_bytes": size} for event, size in records]
    _judge_booked(samples, said, outcome)
    return outcome


MORE = "models that book more than they have"
GROWS = [5] * 50 + [7] * 50


@pytest.mark.parametrize(
    ("booked", "records", "failing"),
    [
        (GROWS, [(LOADED, 5), (COMPLETE, 7)], []),
        (GROWS, [(LOADED, 5), (COMPLETE, 6)], [MORE]),
        (GROWS, [(LOADED, 5)], []),
        (GROWS, [(LOADED, 5), (LOADED, 5)], [MORE]),
        ([5, 10] * 50, [(LOADED, 5), (LOADED, 5)], []),
        ([5] * 100, [], []),
    ],
    ids=["complete", "more", "not complete", "loaded again", "two versions", "no record"],
)
def test_a_complete_model_books_what_it_has(
    booked: list[int], records: list[tuple[str, int]], failing: list[str]
) -> None:
    assert failing == judged(booked, *records).failing


def test_a_model_that_is_not_complete_is_named() -> None:
    outcome = judged(GROWS, (LOADED, 5))

    assert "m" in {one.value for one in outcome.figures if "not complete" in one.what}
