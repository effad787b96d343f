"""Model reports of several workers, merged and compared with that of a single worker."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.executions import succeed

from xlaserve.errors import ShuttingDown
from xlaserve.residence.catalog import IndexEntry
from xlaserve.residence.reports.fold_models import fold_index, fold_reports, fold_states
from xlaserve.residence.reports.fold_status import fold_readings
from xlaserve.residence.reports.monitor import MemoryUse, StatusRow, VersionReport
from xlaserve.residence.reports.status_board import Reading, RequestTotals
from xlaserve.runtime.loaded import Bucket
from xlaserve.serving.statistics import VersionStatistics

REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 80),
        st.lists(st.integers(0, 10**10), min_size=4, max_size=4),
    )
)


@given(REQUESTS)
def test_workers_together_counted_what_one_would_have(
    requests: list[tuple[int, int, list[int]]],
) -> None:
    """Each request goes to one worker; requests with zero rows fail."""
    whole, parts = VersionStatistics(), [VersionStatistics() for _ in range(3)]
    for number, (worker, rows, gaps) in enumerate(requests):
        times = (0, gaps[0], gaps[0] + gaps[1], sum(gaps[:3]), sum(gaps))
        for statistics in (whole, parts[worker]):
            if rows:
                succeed(statistics, rows, times, number * 10**6)
            else:
                statistics.failed(ShuttingDown(), gaps[0])
    expected, *shards = (VersionReport("m", "1", each.totals(), ()) for each in (whole, *parts))

    assert [expected] == fold_reports([[shard] for shard in shards])


def report(name: str, version: str, **changes: object) -> VersionReport:
    found = VersionReport(name, version, VersionStatistics().totals(), ())
    return replace(found, **changes)  # type: ignore[arg-type]


def test_reports_are_ordered_by_model_and_number() -> None:
    first = [report("b", "1"), report("b", "10")]
    second = [report("a", "1"), report("b", "2"), report("b", "10")]
    folded = fold_reports([first, second])

    assert [("a", "1"), ("b", "1"), ("b", "2"), ("b", "10")] == [
        (each.name, each.version) for each in folded
    ]


def test_memory_adds_up_by_device_and_buckets_are_there_once() -> None:
    memory = [(MemoryUse("CPU", 0, 5), MemoryUse("CPU", 1, 7)), (MemoryUse("CPU", 0, 2),)]
    buckets = [
        (Bucket(1, 2.0, 0.25), Bucket(2, 1.0, 0.0)),
        (Bucket(1, 3.0, 0.5), Bucket(2, 1.0, 0.5), Bucket(1, 1.0, 0.1, (8,))),
    ]
    (folded,) = fold_reports(
        [report("m", "1", memory=held, buckets=of)]
        for held, of in zip(memory, buckets, strict=True)
    )

    assert (MemoryUse("CPU", 0, 7), MemoryUse("CPU", 1, 7)) == folded.memory
    assert (Bucket(1, 3.0, 0.25), Bucket(2, 1.0, 0.5), Bucket(1, 1.0, 0.1, (8,))) == folded.buckets


READY, LOADING, UNAVAILABLE = ("READY", ""), ("LOADING", "reading"), ("UNAVAILABLE", "cancelled")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (READY, READY, READY),
        (READY, LOADING, ("LOADING", "worker 1: reading")),
        (LOADING, LOADING, LOADING),
        (LOADING, UNAVAILABLE, ("UNAVAILABLE", "worker 0: reading; worker 1: cancelled")),
        (READY, ("UNLOADING", ""), ("UNLOADING", "")),
        (("UNLOADING", ""), ("LOADING", ""), ("UNLOADING", "")),
    ],
)
def test_a_version_is_ready_when_it_is_in_all_workers(
    first: tuple[str, str], second: tuple[str, str], expected: tuple[str, str]
) -> None:
    assert expected == fold_states({"0": first, "1": second})


def test_an_index_names_the_worker_that_lacks_a_version() -> None:
    first = [IndexEntry("a", "2", *READY), IndexEntry("a", "10", *READY)]
    first += [IndexEntry("c", "", *UNAVAILABLE)]
    second = [IndexEntry("a", "10", *READY), IndexEntry("b", "1", *READY)]
    second += [IndexEntry("c", "", *UNAVAILABLE)]
    both = {"0": first, "1": second}

    assert [
        IndexEntry("a", "2", "UNAVAILABLE", "worker 1: not loaded"),
        IndexEntry("a", "10", *READY),
        IndexEntry("b", "1", "UNAVAILABLE", "worker 0: not loaded"),
        IndexEntry("c", "", *UNAVAILABLE),
    ] == fold_index(both)
    assert first == fold_index({"0": first})


def test_a_model_is_listed_without_a_version_only_where_no_worker_has_one() -> None:
    """The worker without a version says why it has none."""
    never, loaded = IndexEntry("m", "", *UNAVAILABLE), IndexEntry("m", "1", *READY)

    assert [IndexEntry("m", "1", "UNAVAILABLE", "worker 1: cancelled")] == fold_index(
        {"0": [loaded], "1": [never]}
    )


def row(name: str, version: str, count: int, **changes: object) -> StatusRow:
    counts = (count, 0)
    found = StatusRow(name, version, "READY", "", 10, 1.0, 1, count, 1, count, counts, count)
    return replace(found, **changes)  # type: ignore[arg-type]


def reading(*rows: StatusRow, **changes: object) -> Reading:
    success = sum(each.success_count for each in rows)
    totals = RequestTotals(success, 1, (success, 0))
    found = Reading(1.0, True, True, 5, 100, totals, len(rows), len(rows), len(rows), rows)
    return replace(found, **changes)  # type: ignore[arg-type]


def test_the_status_of_all_workers() -> None:
    first = reading(row("m", "1", 3), row("n", "1", 0, size_bytes=None), uptime_seconds=9.0)
    second = reading(row("m", "1", 4, compile_seconds=None), ready=False)
    folded = fold_readings({"0": first, "1": second})

    assert (9.0, False, True, 10, 200) == (
        folded.uptime_seconds,
        folded.ready,
        folded.controllable,
        folded.used_bytes,
        folded.total_bytes,
    )
    assert RequestTotals(7, 2, (7, 0)) == folded.totals
    assert (1, 2, 2) == (folded.ready_models, folded.model_count, folded.matching)
    assert [
        StatusRow("m", "1", "READY", "", 20, 1.0, 2, 7, 2, 7, (7, 0), 4),
        replace(
            row("n", "1", 0, size_bytes=None),
            state="UNAVAILABLE",
            reason="worker 1: not loaded",
        ),
    ] == folded.rows


def test_the_capacity_is_not_known_before_all_workers_know_theirs() -> None:
    known, unknown = reading(), reading(total_bytes=None)

    assert fold_readings({"0": known, "1": unknown}).total_bytes is None


def test_a_server_is_not_ready_while_nobody_knows_of_a_worker() -> None:
    folded = fold_readings({"0": reading()}, {"1": "no answer"})

    assert (False, {"1": "no answer"}) == (folded.ready, folded.missing)
