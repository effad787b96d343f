"""Arrivals and lengths follow the stated distribution, and are the same for a seed."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from xlaserve.bench.errors import BenchmarkRefused
from xlaserve.bench.generation.lengths import (
    ANSWER_MEAN,
    PROMPT_MEAN,
    Lengths,
    drawn,
    read,
    written,
)
from xlaserve.bench.generation.schedule import Schedule, poisson


def planned(seed: int, rate: float = 20.0) -> Schedule:
    return poisson(rate, drawn(seed), warmup=10.0, duration=500.0, seed=seed)


def test_times_between_arrivals_are_exponential() -> None:
    schedule = planned(3)
    times = np.array([one.at for one in schedule.arrivals])
    gaps = np.diff(times)

    assert 0.05 == pytest.approx(gaps.mean(), rel=0.05)
    assert 0.05 == pytest.approx(gaps.std(), rel=0.05)
    assert np.log(2) / 20 == pytest.approx(np.median(gaps), rel=0.05)
    assert times[0] >= 0
    assert times[-1] < 510


def test_the_number_of_arrivals_is_poisson() -> None:
    """Its variance equals its mean; a fixed count would make all runs equally busy."""
    lengths = [Lengths(1, 1)] * 100
    counts = [
        len(poisson(20.0, lengths, warmup=0.0, duration=1.0, seed=seed).arrivals)
        for seed in range(500)
    ]

    assert 20 == pytest.approx(np.mean(counts), rel=0.1)
    assert 20 == pytest.approx(np.var(counts), rel=0.3)


def test_a_seed_gives_the_same_schedule_and_another_another() -> None:
    assert planned(3) == planned(3)
    assert planned(3).arrivals != planned(4).arrivals


def test_the_warm_up_is_not_counted() -> None:
    assert all(one.counted == (one.at >= 10) for one in planned(3).arrivals)
    assert not all(one.counted for one in planned(3).arrivals)


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1000.0, "expected at most 100000 requests"), (1e-9, "no request arrives")],
)
def test_too_many_arrivals_and_none_are_refused(rate: float, text: str) -> None:
    with pytest.raises(BenchmarkRefused, match=text):
        planned(1, rate)


def test_drawn_lengths_have_the_published_means() -> None:
    """The means hold without a maximum length; with one, no length exceeds it."""
    free = list(itertools.islice(drawn(1, 1_000_000), 20_000))
    short = list(itertools.islice(drawn(1, 256), 1000))

    assert PROMPT_MEAN == pytest.approx(np.mean([one.prompt for one in free]), rel=0.05)
    assert ANSWER_MEAN == pytest.approx(np.mean([one.answer for one in free]), rel=0.05)
    assert 256 >= max(one.prompt + one.answer for one in short)
    assert 1 <= min(min(one.prompt, one.answer) for one in short)


def test_lengths_that_are_hardly_ever_drawn_are_refused() -> None:
    with pytest.raises(
        BenchmarkRefused, match="--longest 2: too short, prompts and answers have 161 and 338"
    ):
        next(drawn(1, 2))


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text(written(drawn(5), 100))

    assert 100 == len(read(file))
    assert list(itertools.islice(drawn(5), 100)) == read(file)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected 1 to 100000 lines, got 0"),
        ('{"prompt": 1, "answer": 2}\n\n{"prompt": 1}', "line 3: expected .*answer"),
        ('{"prompt": 1, "answer": 2, "x": 3}', "line 1: .*unknown field `x`"),
        ('{"prompt": 1.5, "answer": 2}', "line 1: .*Expected `int`, got `float`"),
        (
            '{"prompt": 0, "answer": 2}',
            "line 1: expected at least one token in the prompt and in the answer, got 0 and 2",
        ),
        ("1\n" * 100_001, "got 100001"),
        (" " * ((1 << 24) + 1), "has more than 16777216 bytes"),
    ],
)
def test_a_file_that_has_no_lengths_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text(text)

    with pytest.raises(BenchmarkRefused, match=problem):
        read(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkRefused, match="lengths.jsonl' cannot be read: No such file"):
        read(tmp_path / "lengths.jsonl")
