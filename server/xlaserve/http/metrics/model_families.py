"""Metrics reported by model code, in Prometheus' format."""

from collections.abc import Iterator
from itertools import accumulate

from xlaserve.http.metrics.metric_family import escape
from xlaserve.runtime.metrics import Metric, MetricFamily, ModelMetrics


def written(metrics: ModelMetrics) -> str:
    """Return the metrics that model code reports, in Prometheus' text format."""
    return "".join(line for family in metrics.families() for line in _lines(family))


def _lines(family: MetricFamily) -> Iterator[str]:
    yield f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n"
    for key, metric in family.series.items():
        labels = ",".join(f'{name}="{escape(value)}"' for name, value in key)
        if family.kind == "histogram":
            yield from _histogram(family.name, labels, metric)
        else:
            yield f"{family.name}{{{labels}}} {metric.value:.17g}\n"


def _histogram(name: str, labels: str, metric: Metric) -> Iterator[str]:
    more = f"{labels}," if labels else ""
    counts = list(accumulate(metric.counts))
    for bound, count in zip((*metric.bounds, None), counts, strict=True):
        shown = "+Inf" if bound is None else f"{bound:g}"
        yield f'{name}_bucket{{{more}le="{shown}"}} {count}\n'
    yield f"{name}_count{{{labels}}} {counts[-1]}\n"
    yield f"{name}_sum{{{labels}}} {metric.value:.17g}\n"
