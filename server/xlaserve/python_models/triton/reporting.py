"""`pb_utils.Logger`, and `pb_utils.MetricFamily` with its metrics."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import structlog

from xlaserve.runtime.metrics import Described, Metric, ModelMetrics

_SHOWN = 10_000
"""The most characters of one line in the log."""


class LogLevel(StrEnum):
    """Levels of lines, by the names that the log of the server has for them."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    VERBOSE = "debug"


class Logger:
    """Writes into the log of the server, under the name of the model."""

    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE
    LogLevel = LogLevel

    def __init__(self, model: str) -> None:
        self._log: Any = structlog.get_logger("python").bind(model=model)

    def log(self, message: object, level: str = INFO) -> None:
        """Write a line of a level."""
        text = str(message)
        getattr(self._log, level)(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")

    def log_info(self, message: object) -> None:
        """Write a line."""
        self.log(message)

    def log_warn(self, message: object) -> None:
        """Write a warning."""
        self.log(message, self.WARNING)

    def log_error(self, message: object) -> None:
        """Write an error."""
        self.log(message, self.ERROR)

    def log_verbose(self, message: object) -> None:
        """Log a line at level `debug`."""
        self.log(message, self.VERBOSE)


class MetricKind(StrEnum):
    """Kinds of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricFamily:
    """A metric of `GET /metrics`, with any number of sets of labels."""

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    metrics: ModelMetrics
    owner: object = None
    """Set by the class that the module of a model has."""

    def __init__(self, name: str, description: str, kind: str) -> None:
        self._described = Described(name, kind, description)
        self.metrics.check(self._described)

    def Metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] = ()
    ) -> "LabelledMetric":
        """Return the series of a set of labels."""
        found = self.metrics.metric(self.owner, self._described, labels or {}, buckets)
        return LabelledMetric(found)


class LabelledMetric:
    """One series."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def increment(self, value: float) -> None:
        """Add; a counter takes nothing below 0."""
        self._metric.increment(value)

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._metric.set(value)

    def observe(self, value: float) -> None:
        """Count a value of a histogram."""
        self._metric.observe(value)

    def value(self) -> float:
        """Return the value."""
        return self._metric.value
