"""Metrics of several workers, merged into those of one server."""

import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from support.others import PlayedOthers

from xlaserve.concurrency.others import Question
from xlaserve.http.messages import HttpRequest
from xlaserve.http.metrics.generation_families import OF_GENERATORS
from xlaserve.http.metrics.metric_families import OF_MODELS, OF_VERSIONS
from xlaserve.http.metrics.metric_folds import (
    FOLDS,
    FoldedMetrics,
    MetricsSnapshot,
    newest,
    of_workers,
)
from xlaserve.http.metrics.metrics import Metrics
from xlaserve.http.metrics.observing_families import OF_FETCHING, OF_OBSERVING, ObservingReading
from xlaserve.http.metrics.openmetrics import exemplar_text, to_openmetrics
from xlaserve.http.metrics.program_families import OF_PROGRAMS
from xlaserve.http.metrics.server_families import OF_SERVER, OF_SHARED
from xlaserve.residence.capacity import Capacity
from xlaserve.residence.registry import Registry
from xlaserve.serving.observability.exemplar import Exemplar
from xlaserve.serving.observability.loop_lag import LoopLag

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def fold(**texts: str) -> str:
    folded = FoldedMetrics()
    for worker, text in texts.items():
        for _ in folded.add(worker, text):
            pass
    return "".join(folded.texts())


def samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def family(name: str, kind: str, *rows: str) -> str:
    return "".join((f"# HELP {name} h\n# TYPE {name} {kind}\n", *(f"{row}\n" for row in rows)))


def test_every_family_has_a_rule_and_every_rule_a_family() -> None:
    process = CollectorRegistry()
    ProcessCollector(registry=process)
    tables = (
        OF_VERSIONS,
        OF_MODELS,
        OF_SERVER,
        OF_GENERATORS,
        OF_SHARED,
        OF_OBSERVING,
        OF_FETCHING,
        OF_PROGRAMS,
    )
    names = {one.name for table in tables for one in table}
    # The parser strips the suffix of counters.
    names |= {name for name in FOLDS if name.startswith("process_")}
    of_process = {sample.name for found in process.collect() for sample in found.samples}

    assert names == set(FOLDS)
    assert of_process <= set(FOLDS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nv_inference_count", {(): 5}),
        ("nv_model_load_duration_secs", {(): 3}),
        ("xlaserve_model_ready", {(): 2}),
        ("xlaserve_memory_mappings", {(("worker", "w0"),): 2, (("worker", "w1"),): 3}),
        ("gauge_of_code", {(("worker", "w0"),): 2, (("worker", "w1"),): 3}),
    ],
)
def test_each_rule(name: str, expected: dict[tuple[tuple[str, str], ...], float]) -> None:
    texts = {f"w{number}": family(name, "gauge", f"{name} {number + 2}") for number in (0, 1)}

    assert {(name, labels): value for labels, value in expected.items()} == samples(fold(**texts))


def test_rows_that_one_worker_lacks_are_those_of_the_others() -> None:
    """Labels may contain any characters that the format permits."""
    label = r'model="a b} \"1\" \\n{"'
    name = "nv_inference_count"
    one, other = (family(name, "counter", *rows) for rows in ([f"{name}{{{label}}} 1"], []))

    assert samples(one) == samples(fold(w0=one, w1=other))
    assert samples(one) == samples(fold(w0=other, w1=one))


def test_rows_that_are_named_after_a_worker_keep_their_labels() -> None:
    row = r'xlaserve_memory_mappings{a="}{\"",b="x y"} 2'
    text = fold(**{'w"0': family("xlaserve_memory_mappings", "gauge", row)})

    expected = (("a", '}{"'), ("b", "x y"), ("worker", 'w"0'))
    assert {("xlaserve_memory_mappings", expected): 2} == samples(text)


def test_histograms_add_up_and_exemplars_find_their_buckets() -> None:
    """Including those with a worker label: the bound is the last label in either format."""
    name, key = "xlaserve_request_seconds", 'xlaserve_request_seconds_bucket{model="m",le="0.5"'
    rows = [f'{name}_bucket{{model="m",le="{le}"}} ' for le in ("0.5", "+Inf")]
    rows += [f'{name}_count{{model="m"}} ', f'{name}_sum{{model="m"}} 0.5']
    lags = LoopLag()
    lags.note(0.004)
    lag = next(one for one in OF_OBSERVING if one.kind == "histogram")
    lagging = lag.head + "".join(lag.lines("", ObservingReading(lag=lags)))
    one, other = (
        family(name, "histogram", *(f"{row}{count}" for row in rows)) + lagging for count in (1, 2)
    )
    text = fold(w0=one, w1=other)
    found = samples(text)
    shown = to_openmetrics(text, {key: exemplar_text(Exemplar(1, 0.4, 5.0))})

    assert 3 == found[f"{name}_bucket", (("le", "0.5"), ("model", "m"))]
    assert 0.51 + 0.52 == found[f"{name}_sum", (("model", "m"),)]
    assert 1 == found[f"{lag.name}_count", (("worker", "w1"),)]
    assert 1 == found[f"{lag.name}_bucket", (("le", "0.005"), ("worker", "w0"))]
    assert f"{key}}} 3 # {{trace_id=" in shown
    assert f'{lag.name}_bucket{{worker="w0",le="0.005"}} 1\n' in shown


def test_whole_numbers_stay_whole() -> None:
    large = 2**60 + 1
    text = family("nv_inference_count", "counter", f"nv_inference_count {large}")

    assert f"nv_inference_count {2 * large}\n" in fold(w0=text, w1=text)


def test_requests_have_their_turn_within_a_long_text() -> None:
    text = family("nv_inference_count", "counter", *(f'a{{b="{n}"}} 1' for n in range(3500)))

    assert 3 == sum(1 for _ in FoldedMetrics().add("w0", text))


def test_workers_that_did_not_answer_are_named() -> None:
    name = "xlaserve_worker_answered"

    assert {(name, (("worker", "0"),)): 1, (name, (("worker", "1"),)): 0} == samples(
        of_workers({"0": True, "1": False})
    )


def test_of_two_exemplars_of_one_row_the_newest_is_kept() -> None:
    first = {"a": (2.0, "new"), "b": (1.0, "only")}

    assert {"a": "new", "b": "only"} == newest([first, {"a": (1.0, "old")}])
    assert {"a": "new", "b": "only"} == newest([{"a": (1.0, "old")}, first])


async def test_a_scrape_is_of_all_workers_and_names_those_that_did_not_answer() -> None:
    capacity = Capacity({"cpu:0": 100})
    one, other = Metrics(Registry(10), capacity), PlayedOthers({})
    Metrics(Registry(10), capacity, others=other)
    theirs = await other.answering[Question.METRICS]({})
    assert isinstance(theirs, MetricsSnapshot)
    row = 'xlaserve_request_seconds_bucket{model="m",version="1",le="0.5"'
    histogram = family("xlaserve_request_seconds", "histogram", f"{row}}} 1")
    theirs = theirs._replace(
        text=theirs.text + histogram, exemplars={row: (5.0, exemplar_text(Exemplar(1, 0.4, 5.0)))}
    )
    others = PlayedOthers({"1": theirs}, {"2": "no answer"})
    metrics = Metrics(Registry(10), capacity, others=others)
    answers = {}
    for accept in ("", "application/openmetrics-text"):
        answer = await metrics.show(
            HttpRequest(headers=CIMultiDictProxy(CIMultiDict({"Accept": accept})))
        )
        answers[accept] = b"".join(answer.parts).decode()
    plain = samples(answers[""])
    names = {name for name, _ in samples(b"".join(await one.parts()).decode())}

    assert 200 == plain["xlaserve_capacity_bytes", ()]
    assert 0 < plain["process_resident_memory_bytes", (("worker", "1"),)]
    assert [1, 1, 0] == [
        plain["xlaserve_worker_answered", (("worker", worker),)] for worker in "012"
    ]
    assert names <= {name for name, _ in plain}
    assert f"{row}}} 1 # {{trace_id=" in answers["application/openmetrics-text"]
    assert answers["application/openmetrics-text"].endswith("# EOF\n")
