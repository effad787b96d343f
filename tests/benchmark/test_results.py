import xml.etree.ElementTree as ET
from array import array
from collections import Counter

import pytest

from xlaserve.bench.chart import latency_chart, ticks
from xlaserve.bench.load import Measured, Step
from xlaserve.bench.results import percentile, result

SVG = "{http://www.w3.org/2000/svg}"


def measured(*latencies: float, **errors: int) -> Measured:
    return Measured(Step(2, 4), 2.0, array("d", latencies), Counter(errors), 0.5)


@pytest.mark.parametrize(
    ("percent", "value"), [(50, 50), (90, 90), (99, 99), (99.5, 100), (100, 100), (0, 1)]
)
def test_percentile_is_one_of_the_values(percent: float, value: int) -> None:
    assert value == percentile(range(1, 101), percent)


def test_errors_are_no_answers() -> None:
    found = result(measured(0.001, 0.002, 0.003, UNAVAILABLE=5))

    assert (3, 1.5, 8) == (found.answers, found.answers_per_second, found.step.concurrency)
    assert {"p50": 2.0, "p90": 3.0, "p95": 3.0, "p99": 3.0, "max": 3.0} == found.latency_ms
    assert {"UNAVAILABLE": 5} == found.errors


def test_a_step_without_an_answer_has_no_latencies() -> None:
    found = result(measured(UNAVAILABLE=1))

    assert (0, 0.0, {}) == (found.answers, found.answers_per_second, found.latency_ms)


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (7.3, [0, 2, 4, 6, 8]),
        (98_230, [0, 20_000, 40_000, 60_000, 80_000, 100_000]),
    ],
)
def test_ticks_are_round_and_reach_the_largest(largest: float, expected: list[float]) -> None:
    assert expected == pytest.approx(ticks(largest))


def test_the_chart_has_a_point_for_each_step_that_was_answered() -> None:
    results = [result(measured(0.001)), result(measured(0.002, 0.003)), result(measured())]
    root = ET.fromstring(latency_chart("a <model>", results))

    assert 3 * 2 == len(root.findall(f"{SVG}circle"))
    assert ["a <model>"] == [one.text for one in root.findall(f"{SVG}title")]


def test_a_chart_of_nothing_is_a_chart() -> None:
    assert f"{SVG}svg" == ET.fromstring(latency_chart("none", [])).tag
