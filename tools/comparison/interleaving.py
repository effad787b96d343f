"""Alternates repetitions of all contenders of a row, so that disturbances affect all of them."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from comparison.kit import Repetition

Numbers: TypeAlias = dict[str, Any]
"""A contender's medians, the number of repetitions behind them, and all repetitions."""

CLEAN_SHARE = 0.15
"""In cores: a repetition counts as disturbed if other processes used more CPU time than that."""
_FAILURES = 2
"""Failed repetitions after which a contender is skipped."""
_MEASURES = (
    *("rps", "p50", "p90", "p99", "seconds", "first_seconds"),
    *("server_cpu", "client_cpu", "cpu_us"),
)


@dataclass(frozen=True, slots=True)
class Rounds:
    """Limits on the number of rounds."""

    wanted: int
    """Clean repetitions of each contender."""
    most: int
    """Rounds after which disturbed repetitions are accepted."""


def interleave(
    measures: Mapping[str, Callable[[], Repetition]],
    rounds: Rounds,
    show: Callable[[str, Repetition], None],
) -> dict[str, Numbers]:
    """Measure all contenders alternately until each has enough clean repetitions."""
    found: dict[str, list[Repetition]] = {name: [] for name in measures}
    for _ in range(rounds.most):
        for name, measure in measures.items():
            if not _has_enough(found[name], rounds.wanted):
                found[name].append(measure())
                show(name, found[name][-1])
    return {name: summary(repetitions) for name, repetitions in found.items()}


def is_clean(repetition: Repetition) -> bool:
    """Tell whether a repetition succeeded undisturbed by other processes."""
    return "error" not in repetition and (repetition.get("other_cpu") or 0) <= CLEAN_SHARE


def summary(repetitions: list[Repetition]) -> Numbers:
    """Return the medians of the clean repetitions, or of all successful ones if none is clean."""
    good = [one for one in repetitions if "error" not in one]
    clean = [one for one in good if is_clean(one)]
    numbers: Numbers = {"clean": len(clean), "repetitions": repetitions}
    if not good:
        numbers["error"] = repetitions[-1]["error"] if repetitions else "not measured"
    for measure in _MEASURES:
        values = [one[measure] for one in clean or good if one.get(measure) is not None]
        if values:
            numbers[measure] = statistics.median(values)
    return numbers


def _has_enough(repetitions: list[Repetition], wanted: int) -> bool:
    failures = sum("error" in one for one in repetitions)
    return failures >= _FAILURES or sum(map(is_clean, repetitions)) >= wanted
