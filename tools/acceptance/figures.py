"""Figures with their criteria, and the detection of growing memory."""

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
    """The figures of one row, in the order of measurement."""

    figures: list[Figure] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Tell whether there are figures and all of them meet their criteria."""
        return bool(self.figures) and all(figure.holds for figure in self.figures)

    @property
    def failing(self) -> list[str]:
        """Return the names of failed figures."""
        return [figure.what for figure in self.figures if not figure.holds]

    def add(self, what: str, value: object, criterion: str, *, holds: bool) -> None:
        """Add a figure with the caller's verdict."""
        self.figures.append(Figure(what, str(value), criterion, holds))

    def note(self, what: str, value: object) -> None:
        """Add a figure without a criterion."""
        self.figures.append(Figure(what, str(value), "none, for information", True))

    def at_most(self, what: str, value: float, most: float, unit: str = "") -> None:
        """Add a figure with an upper limit."""
        holds = value <= most
        self.add(what, f"{value:g}{unit}", f"at most {most:g}{unit}", holds=holds)

    def at_least(self, what: str, value: float, least: float, unit: str = "") -> None:
        """Add a figure with a lower limit."""
        holds = value >= least
        self.add(what, f"{value:g}{unit}", f"at least {least:g}{unit}", holds=holds)

    def none(self, what: str, found: Sequence[str]) -> None:
        """Add a count that must be zero, and show the first item counted."""
        shown = "; ".join(dict.fromkeys(found))[:400] if found else ""
        value = f"{len(found)}: {shown}" if found else "0"
        self.add(what, value, "0", holds=not found)


def slope(values: "Sequence[float] | np.ndarray[Any, Any]") -> float:
    """Return the growth of a value per sample (least squares)."""
    if len(values) < 2:
        return 0.0
    return float(np.polyfit(np.arange(len(values)), np.asarray(values, np.float64), 1)[0])


def level(values: Sequence[float]) -> float:
    """Return the median, which ignores short peaks."""
    return float(np.median(np.asarray(values, np.float64))) if values else 0.0


def growth(samples: Sequence[float], part: float = 0.2) -> float:
    """Return the median of the last `part` of the samples minus that of as many in the middle."""
    count = max(1, int(len(samples) * part))
    middle = len(samples) // 2
    return level(samples[-count:]) - level(samples[middle : middle + count])


def percentile(values: Sequence[float], rank: float) -> float:
    """Return a percentile, or 0 without values."""
    return float(np.percentile(np.asarray(values, np.float64), rank)) if values else 0.0
