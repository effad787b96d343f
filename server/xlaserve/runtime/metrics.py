"""Metrics reported by a model's code: limited in number, removed with the model."""

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

MAX_FAMILIES = 256
"""Maximum number of metric names, for all models together."""

MAX_SERIES = 4096
"""Maximum number of label sets per metric name."""

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED = ("xlaserve_", "nv_", "process_")
"""Name prefixes reserved for the server."""

Labels: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Described:
    """Name and description of a metric."""

    name: str
    kind: str
    """counter, gauge or histogram."""
    help: str = ""


class MetricError(ValueError):
    """A metric that is not permitted or not valid in Prometheus."""


class Metric:
    """One series. Any thread may change its value."""

    def __init__(self, kind: str, bounds: Sequence[float] = ()) -> None:
        self.kind = kind
        self.bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._value = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def increment(self, by: float = 1) -> None:
        """Add an amount; raises MetricError if it is negative and this is a counter."""
        if self.kind == "histogram" or (self.kind == "counter" and not by >= 0):
            raise MetricError(f"a {self.kind} cannot be incremented by {by}")
        with self._lock:
            self._value += by

    def set(self, value: float) -> None:
        """Set a gauge."""
        if self.kind != "gauge":
            raise MetricError(f"a {self.kind} cannot be set")
        with self._lock:
            self._value = float(value)

    def observe(self, value: float) -> None:
        """Add an observation to a histogram."""
        if self.kind != "histogram":
            raise MetricError(f"a {self.kind} has no observations: use a histogram")
        place = sum(bound < value for bound in self.bounds)
        with self._lock:
            self._counts[place] += 1
            self._value += value

    @property
    def value(self) -> float:
        """Return the value; for a histogram, the sum of its observations."""
        return self._value

    @property
    def counts(self) -> list[int]:
        """Return the number of observations per bucket, the last one unbounded."""
        with self._lock:
            return list(self._counts)


@dataclass(slots=True)
class MetricFamily:
    """All series with one name."""

    name: str
    kind: str
    """counter, gauge or histogram."""
    help: str
    series: dict[Labels, Metric] = field(default_factory=dict)
    owners: dict[Labels, set[object]] = field(default_factory=dict)


class ModelMetrics:
    """The metrics of all models. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, MetricFamily] = {}

    def families(self) -> list[MetricFamily]:
        """Return a copy of all metric families by name."""
        with self._lock:
            return [
                MetricFamily(one.name, one.kind, one.help, dict(one.series))
                for _, one in sorted(self._families.items())
            ]

    def check(self, described: Described) -> None:
        """Raise MetricError for an invalid or reserved name, or one that has another kind."""
        name = described.name
        if not _NAME.fullmatch(name) or len(name) > _LONGEST:
            raise MetricError(f"metric {name[:_LONGEST]!r}: expected a name of letters and digits")
        if name.startswith(_RESERVED):
            raise MetricError(f"metric '{name}': this prefix is reserved for the server")
        with self._lock:
            self._found(described)

    def metric(
        self,
        owner: object,
        described: Described,
        labels: Mapping[str, str],
        bounds: Sequence[float] = (),
    ) -> Metric:
        """Return the series with these labels; created on first use.

        Raises MetricError for names or labels that Prometheus does not accept, for a name of
        another kind, and beyond the limits.
        """
        self.check(described)
        key = tuple(sorted((str(label), str(value)) for label, value in labels.items()))
        for label, value in key:
            if not _LABEL.fullmatch(label) or len(label) > _LONGEST or len(value) > _LONGEST:
                place = f"metric '{described.name}'"
                raise MetricError(f"{place}: label {label[:_LONGEST]!r} is invalid")
        with self._lock:
            family = self._found(described) or self._add(described)
            found = family.series.get(key)
            if found is None:
                if len(family.series) >= MAX_SERIES:
                    place = f"metric '{described.name}'"
                    raise MetricError(f"{place} has {MAX_SERIES} label sets already")
                found = family.series[key] = Metric(described.kind, bounds)
            family.owners.setdefault(key, set()).add(owner)
            return found

    def _found(self, described: Described) -> MetricFamily | None:
        family = self._families.get(described.name)
        if family is not None and family.kind != described.kind:
            raise MetricError(
                f"metric '{described.name}' is a {family.kind} already, got a {described.kind}"
            )
        return family

    def _add(self, described: Described) -> MetricFamily:
        name = described.name
        if len(self._families) >= MAX_FAMILIES:
            raise MetricError(f"metric '{name}': models have {MAX_FAMILIES} metrics already")
        text = " ".join(described.help[:_LONGEST].replace("\\", "").split())
        family = self._families[name] = MetricFamily(name, described.kind, text)
        return family

    def forget(self, owner: object) -> None:
        """Remove the series that no other owner reports."""
        with self._lock:
            for name, family in list(self._families.items()):
                for key, owners in list(family.owners.items()):
                    owners.discard(owner)
                    if not owners:
                        del family.owners[key], family.series[key]
                if not family.series:
                    del self._families[name]


_LONGEST = 256
