"""Merges the status readings of several workers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from xlaserve.residence.reports.fold_models import States, fold_states, of_each, versions_of
from xlaserve.residence.reports.monitor import StatusRow
from xlaserve.residence.reports.status_board import MAX_ROWS, Reading, RequestTotals


def fold_readings(
    answers: Mapping[str, Reading], missing: Mapping[str, str] = MappingProxyType({})
) -> Reading:
    """Merge status readings; `answers` maps worker names to readings.

    `missing` says why other workers did not answer; the server is then not ready.
    """
    readings = list(answers.values())
    totals = [reading.totals for reading in readings]
    rows = _rows(answers)
    return Reading(
        uptime_seconds=max(reading.uptime_seconds for reading in readings),
        ready=not missing and all(reading.ready for reading in readings),
        controllable=all(reading.controllable for reading in readings),
        used_bytes=sum(reading.used_bytes for reading in readings),
        total_bytes=_sum_if_known([reading.total_bytes for reading in readings]),
        totals=RequestTotals(
            sum(each.success_count for each in totals),
            sum(each.fail_count for each in totals),
            tuple(map(sum, zip(*(each.request_buckets for each in totals), strict=True))),
        ),
        ready_models=min(reading.ready_models for reading in readings),
        model_count=max(reading.model_count for reading in readings),
        matching=max(len(rows), *(reading.matching for reading in readings)),
        rows=rows[:MAX_ROWS],
        missing=missing,
    )


def _rows(answers: Mapping[str, Reading]) -> list[StatusRow]:
    known = {
        worker: {(row.name, row.version): row for row in reading.rows}
        for worker, reading in answers.items()
    }
    states = {
        worker: {key: (row.state, row.reason) for key, row in rows.items()}
        for worker, rows in known.items()
    }
    return [
        _row([rows[key] for rows in known.values() if key in rows], of_each(states, key))
        for key in versions_of(known.values())
    ]


def _row(rows: Sequence[StatusRow], states: States) -> StatusRow:
    state, reason = fold_states(states)
    sizes = [row.size_bytes for row in rows if row.size_bytes is not None]
    buckets = [row.request_buckets for row in rows if row.request_buckets]
    return replace(
        rows[0],
        state=state,
        reason=reason,
        size_bytes=sum(sizes) if sizes else None,
        compile_seconds=_most([row.compile_seconds for row in rows]),
        pending=_sum(rows, lambda row: row.pending),
        success_count=_sum(rows, lambda row: row.success_count),
        fail_count=_sum(rows, lambda row: row.fail_count),
        request_ns=_sum(rows, lambda row: row.request_ns),
        request_buckets=tuple(map(sum, zip(*buckets, strict=True))),
        last_inference_ms=max(row.last_inference_ms for row in rows),
    )


def _sum(rows: Iterable[StatusRow], read: Callable[[StatusRow], int]) -> int:
    return sum(map(read, rows))


def _sum_if_known(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
