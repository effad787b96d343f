"""Metrics that the code of models reports, and their limits."""

from collections.abc import Callable

import pytest

from xlaserve.http.metrics.model_families import written
from xlaserve.runtime import metrics
from xlaserve.runtime.metrics import Described, MetricError, ModelMetrics


def counter(name: str = "c") -> Described:
    return Described(name, "counter", "Some\nhelp \\ ")


@pytest.mark.parametrize("name", ["", "9", "a b", "ä", "xlaserve_x", "nv_x", "x" * 300])
def test_a_name_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(MetricError):
        ModelMetrics().metric("owner", counter(name), {})


@pytest.mark.parametrize("labels", [{"a b": "1"}, {"": "1"}, {"a": "x" * 300}])
def test_a_label_that_cannot_be_is_refused(labels: dict[str, str]) -> None:
    with pytest.raises(MetricError):
        ModelMetrics().metric("owner", counter(), labels)


def test_names_and_labels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_FAMILIES", 2)
    monkeypatch.setattr(metrics, "MAX_SERIES", 2)
    found = ModelMetrics()
    for number in range(2):
        found.metric("owner", counter(f"c{number}"), {})
        found.metric("owner", counter("c0"), {"n": str(number)}) if number else None

    with pytest.raises(MetricError, match="models have 2 metrics already"):
        found.metric("owner", counter("c2"), {})
    with pytest.raises(MetricError, match="'c0' has 2 label sets already"):
        found.metric("owner", counter("c0"), {"n": "2"})


def test_a_name_has_one_kind() -> None:
    found = ModelMetrics()
    found.metric("owner", counter(), {})

    with pytest.raises(MetricError, match="'c' is a counter already, got a gauge"):
        found.metric("owner", Described("c", "gauge"), {})


def test_what_a_kind_cannot_do_is_refused() -> None:
    found = ModelMetrics()
    count = found.metric("owner", counter(), {})
    gauge = found.metric("owner", Described("g", "gauge"), {})
    histogram = found.metric("owner", Described("h", "histogram"), {}, [1])

    impossible: tuple[Callable[[], None], ...] = (
        lambda: count.increment(-1),
        lambda: count.increment(float("nan")),
        lambda: count.set(1),
        lambda: count.observe(1),
        lambda: gauge.observe(1),
        lambda: histogram.increment(1),
        lambda: histogram.set(1),
    )
    for refused in impossible:
        with pytest.raises(MetricError):
            refused()


def test_a_series_stays_while_one_of_its_owners_is_there() -> None:
    found = ModelMetrics()
    one = found.metric("old", counter(), {"a": "b"})
    assert one is found.metric("new", counter(), {"a": "b"})
    found.forget("old")

    assert [one] == [series for family in found.families() for series in family.series.values()]
    found.forget("new")
    assert [] == found.families()


def test_they_are_written_as_prometheus_reads_them() -> None:
    found = ModelMetrics()
    found.metric("owner", counter(), {"a": 'x"\n\\'}).increment(3)
    histogram = found.metric("owner", Described("h", "histogram"), {"m": "x"}, [1, 5])
    for value in (0.5, 1, 3, 7):
        histogram.observe(value)

    assert written(found) == (
        "# HELP c Some help\n# TYPE c counter\n"
        'c{a="x\\"\\n\\\\"} 3\n'
        "# HELP h \n# TYPE h histogram\n"
        'h_bucket{m="x",le="1"} 2\nh_bucket{m="x",le="5"} 3\nh_bucket{m="x",le="+Inf"} 4\n'
        'h_count{m="x"} 4\nh_sum{m="x"} 11.5\n'
    )
