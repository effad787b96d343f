"""Each detector finds what is there on purpose: a leak, a call that hangs, a wrong answer."""

from pathlib import Path

import pytest

from acceptance import loads, requests
from acceptance.subjects import SPOILERS

pytestmark = pytest.mark.slow

FOUND_BY = {
    "leaks": "memory in the second half",
    "hangs": "not answered",
    "is wrong": "wrong answers",
}


@pytest.mark.parametrize("how", SPOILERS)
def test_a_model_that_does_what_it_should_not_is_found(tmp_path: Path, how: str) -> None:
    # Of 2,000 the second half leaks about as much as is allowed.
    outcome = requests.mixed(tmp_path, count=4000, spoiled=how, seconds=3)

    assert [FOUND_BY[how]] == outcome.failing


def test_a_load_that_keeps_something_is_found(tmp_path: Path) -> None:
    outcome = loads.cycles(tmp_path, count=100, most_kib=40, leaks=True)

    assert ["memory per cycle"] == outcome.failing


def test_answers_that_are_not_released_are_found(tmp_path: Path) -> None:
    """A client that stays keeps what it was to be sent."""
    outcome = requests.aborted(tmp_path, count=100, keeps=True)

    assert ["memory 5 s behind them"] == outcome.failing
