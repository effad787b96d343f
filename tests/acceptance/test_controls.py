"""Every detector finds a deliberate fault: a leak, a hanging call, a wrong answer."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
from support import identity_models, python_models

from acceptance import loads, requests
from acceptance.books import Fate
from acceptance.crowd import Kind, Place
from acceptance.everything import everything
from acceptance.subjects import SPOILERS

pytestmark = pytest.mark.slow

FOUND_BY = {
    "leaks": "memory in the second half",
    "hangs": "not answered",
    "is wrong": "wrong answers",
}


@pytest.mark.parametrize("how", SPOILERS)
def test_a_model_that_does_what_it_should_not_is_found(tmp_path: Path, how: str) -> None:
    # With 2,000 requests the second half would leak no more than is allowed.
    outcome = requests.mixed(tmp_path, count=4000, spoiled=how, seconds=3)

    assert [FOUND_BY[how]] == outcome.failing


def test_a_load_that_keeps_something_is_found(tmp_path: Path) -> None:
    outcome = loads.cycles(tmp_path, count=100, most_kib=40, leaks=True)

    assert ["memory per cycle"] == outcome.failing


def test_answers_that_are_not_released_are_found(tmp_path: Path) -> None:
    """A client that stays connected keeps its unsent answers."""
    outcome = requests.aborted(tmp_path, count=100, keeps=True)

    assert ["memory 5 s behind them"] == outcome.failing


async def _asks(place: Place, random: Random) -> None:
    await place.infer("one.model", np.ones(3, np.float32))


async def _counts_too_many(place: Place, random: Random) -> None:
    await _asks(place, random)
    if place.books.turns == 3:
        place.books.note("one.model", Fate.ANSWERED)


async def _expects_another(place: Place, random: Random) -> None:
    found = await place.infer("one.model", np.ones(3, np.float32))
    place.books.expect(float(found[0]) == 2, f"1 was {found[0]}")


def _write_echo(root: Path) -> None:
    identity_models.write(root, "one.model", "FP32")


def _write_leaking(root: Path) -> None:
    python_models.write_function(root, "one.model", SPOILERS["leaks"])


@pytest.mark.parametrize(
    ("kind", "figure"),
    [
        (Kind("one", _counts_too_many, ("one.model",), _write_echo), "counters that differ"),
        (Kind("one", _expects_another, ("one.model",), _write_echo), "wrong answers"),
        (
            Kind("one", _asks, ("one.model",), _write_leaking, pause_seconds=0),
            "memory in the second half",
        ),
    ],
    ids=["a count that differs", "a wrong answer", "a leak"],
)
def test_the_soak_finds_what_one_kind_does_and_names_it(
    tmp_path: Path, kind: Kind, figure: str
) -> None:
    quiet = Kind("quiet", _quiet, ("quiet.model",), _write_quiet)

    outcome = everything(tmp_path, seconds=8, kept_mib=0, kinds=(quiet, kind))

    (found,) = [one for one in outcome.figures if not one.holds]
    assert figure == found.what
    assert ("one: " in found.value) is (figure != "memory in the second half")
    assert "quiet" not in found.value


def test_the_soak_without_a_kind_has_neither_it_nor_what_it_does(tmp_path: Path) -> None:
    quiet = Kind("quiet", _quiet, ("quiet.model",), _write_quiet)
    odd = Kind("one", _counts_too_many, ("one.model",), _write_echo)

    outcome = everything(tmp_path, seconds=4, kinds=(quiet, odd), without=("one",))

    assert [] == outcome.failing
    assert not (tmp_path / "models" / "one.model").exists()


async def _quiet(place: Place, random: Random) -> None:
    await place.infer("quiet.model", np.ones(3, np.float32))


def _write_quiet(root: Path) -> None:
    identity_models.write(root, "quiet.model", "FP32")
