"""One metric in Prometheus' text format."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

Subject = TypeVar("Subject")

Row: TypeAlias = tuple[str, str, float]
"""Name suffix, labels that follow the subject's labels, and value."""


@dataclass(frozen=True, slots=True)
class Family(Generic[Subject]):
    """One metric: its name, its help text, and the function that reads its rows."""

    name: str
    kind: str
    """counter, gauge or histogram."""
    help: str
    read: Callable[[Subject], Iterable[Row]]
    labels: tuple[str, ...] = ()

    @property
    def head(self) -> str:
        """Return the lines above the rows."""
        return f"# HELP {self.name} {self.help}\n# TYPE {self.name} {self.kind}\n"

    def lines(self, labels: str, subject: Subject) -> list[str]:
        """Return the rows of one subject; `labels` are its serialized labels."""
        name = self.name
        return [
            f"{name}{suffix}{{{labels}{more}}} {value}\n"
            if labels or more
            else f"{name}{suffix} {value}\n"
            for suffix, more, value in self.read(subject)
        ]


def counter(
    name: str, help: str, read: Callable[[Subject], Iterable[Row]], *labels: str
) -> Family[Subject]:
    """Return a counter, which only increases."""
    return Family(name, "counter", help, read, labels)


def gauge(
    name: str, help: str, read: Callable[[Subject], Iterable[Row]], *labels: str
) -> Family[Subject]:
    """Return a gauge, which may increase and decrease."""
    return Family(name, "gauge", help, read, labels)


def histogram(name: str, help: str, read: Callable[[Subject], Iterable[Row]]) -> Family[Subject]:
    """Return a histogram, whose rows are counts by upper bound."""
    return Family(name, "histogram", help, read, ("le",))


def escape(value: str) -> str:
    r"""Escape a label value: only backslash, quote and line feed."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def one(value: float) -> tuple[Row]:
    """Return the row of a metric without labels."""
    return (("", "", value),)
