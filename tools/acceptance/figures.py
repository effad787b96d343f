"""Figures with the criterion beside each, and how memory that grows is recognised."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MIB = 1 << 20
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a row."""

    what: str
    value: str
    criterion: str
    holds: bool

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "FAILS"
        return f"{self.what}: {self.value} (criterion: {self.criterion}) {verdict}"


@dataclass(slots=True)
class Outcome:
    """The figures of one row, in the order in which they were taken."""

    figures: list[Figure] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Tell whether there are figures, and each of them meets its criterion."""
        return bool(self.figures) and all(figure.holds for figure in self.figures)

    @property
    def failing(self) -> list[str]:
        """Return the names of failed figures."""
        return [figure.what for figure in self.figures if not figure.holds]

    def add(self, what: str, value: object, criterion: str, *, holds: bool) -> None:
        """Add a figure that was judged already."""
        self.figures.append(Figure(what, str(value), criterion, holds))

    def note(self, what: str, value: object) -> None:
        """Add a figure that has no criterion."""
        self.figures.append(Figure(what, str(value), "none, for information", True))

    def at_most(self, what: str, value: float, most: float, unit: str = "") -> None:
        """Add a figure that may be no larger than that."""
        holds = value <= most
        self.add(what, f"{value:g}{unit}", f"at most {most:g}{unit}", holds=holds)

    def at_least(self, what: str, value: float, least: float, unit: str = "") -> None:
        """Add a figure that may be no smaller than that."""
        holds = value >= least
        self.add(what, f"{value:g}{unit}", f"at least {least:g}{unit}", holds=holds)

    def none(self, what: str, found: Sequence[str]) -> None:
        """Add a count that has to be zero; the first of what was counted is shown."""
        shown = "; ".join(dict.fromkeys(found))[:400] if found else ""
        value = f"{len(found)}: {shown}" if found else "0"
        self.add(what, value, "0", holds=not found)


def slope(values: "Sequence[float] | np.ndarray[Any, Any]") -> float:
    """Return by how much a value grows from one sample to the next (least squares)."""
    if len(values) < 2:
        return 0.0
    return float(np.polyfit(np.arange(len(values)), np.asarray(values, np.float64), 1)[0])


def level(values: Sequence[float]) -> float:
    """Return the median: what a server holds, apart from moments in which it holds more."""
    return float(np.median(np.asarray(values, np.float64))) if values else 0.0


def growth(samples: Sequence[float], part: float = 0.2) -> float:
    """Return by how much the end of a run is above its middle, by medians of so large parts."""
    count = max(1, int(len(samples) * part))
    middle = len(samples) // 2
    return level(samples[-count:]) - level(samples[middle : middle + count])


def percentile(values: Sequence[float], rank: float) -> float:
    """Return a percentile; 0 of nothing."""
    return float(np.percentile(np.asarray(values, np.float64), rank)) if values else 0.0
