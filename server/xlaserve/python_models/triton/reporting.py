"""`pb_utils.Logger`, and `pb_utils.MetricFamily` with its metrics."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import structlog

from xlaserve.runtime.metrics import Described, Metric, ModelMetrics

_SHOWN = 10_000
"""Maximum length of a logged message, in characters."""


class LogLevel(StrEnum):
    """Log levels, with the server's names."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    VERBOSE = "debug"


class Logger:
    """Writes to the server's log, with the model's name."""

    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE
    LogLevel = LogLevel

    def __init__(self, model: str) -> None:
        self._log: Any = structlog.get_logger("python").bind(model=model)

    def log(self, message: object, level: str = INFO) -> None:
        """Log a message at this level."""
        text = str(message)
        getattr(self._log, level)(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")

    def log_info(self, message: object) -> None:
        """Log a message at level `info`."""
        self.log(message)

    def log_warn(self, message: object) -> None:
        """Log a message at level `warning`."""
        self.log(message, self.WARNING)

    def log_error(self, message: object) -> None:
        """Log a message at level `error`."""
        self.log(message, self.ERROR)

    def log_verbose(self, message: object) -> None:
        """Log a message at level `debug`."""
        self.log(message, self.VERBOSE)


class MetricKind(StrEnum):
    """Types of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricFamily:
    """A metric in `GET /metrics`, with one time series per set of labels."""

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    metrics: ModelMetrics
    owner: object = None
    """Key under which the server keeps the model's metrics; set in a subclass per model."""

    def __init__(self, name: str, description: str, kind: str) -> None:
        self._described = Described(name, kind, description)
        self.metrics.check(self._described)

    def Metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] = ()
    ) -> "LabelledMetric":
        """Return the time series with these labels."""
        found = self.metrics.metric(self.owner, self._described, labels or {}, buckets)
        return LabelledMetric(found)


class LabelledMetric:
    """One time series of a metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def increment(self, value: float) -> None:
        """Add a value, which must not be negative for a counter."""
        self._metric.increment(value)

    def set(self, value: float) -> None:
        """Set the value of a gauge."""
        self._metric.set(value)

    def observe(self, value: float) -> None:
        """Add a value to a histogram."""
        self._metric.observe(value)

    def value(self) -> float:
        """Return the current value."""
        return self._metric.value
