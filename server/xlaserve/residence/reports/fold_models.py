"""Merges statistics and states of models from several workers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from xlaserve.residence.catalog import IndexEntry
from xlaserve.residence.failed_loads import NOT_LOADED
from xlaserve.residence.lifecycle import State
from xlaserve.residence.reports.monitor import MemoryUse, VersionReport
from xlaserve.runtime.loaded import Bucket
from xlaserve.serving.observability.statistics_sum import sum_of

_GRAVITY: Mapping[str, int] = MappingProxyType(
    {
        State.UNAVAILABLE.public: 0,
        State.UNLOADING.public: 1,
        State.LOADING.public: 2,
        State.READY.public: 3,
    }
)
"""Order of the states shown in the index: the lowest state of any worker is the merged one."""

Key = tuple[str, str]
"""A model name and a version."""

States = Mapping[str, tuple[str, str]]
"""State and reason of a version, by worker."""


# --- Statistics ---


def fold_reports(answers: Iterable[Sequence[VersionReport]]) -> list[VersionReport]:
    """Merge reports by version, adding up counts, durations and memory."""
    found: dict[Key, list[VersionReport]] = {}
    for reports in answers:
        for report in reports:
            found.setdefault((report.name, report.version), []).append(report)
    return [_report(found[key]) for key in sorted(found, key=_ascending)]


def _report(reports: Sequence[VersionReport]) -> VersionReport:
    if len(reports) == 1:
        return reports[0]
    memory: dict[tuple[str, int], int] = {}
    for use in (use for report in reports for use in report.memory):
        key = (use.kind, use.device_id)
        memory[key] = memory.get(key, 0) + use.size_bytes
    return replace(
        reports[0],
        totals=sum_of([report.totals for report in reports]),
        memory=tuple(MemoryUse(kind, number, size) for (kind, number), size in memory.items()),
        buckets=_buckets(bucket for report in reports for bucket in report.buckets),
    )


def _buckets(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """Merge buckets of equal shape; keep the slowest compilation and the fastest execution."""
    found: dict[tuple[int, tuple[int, ...]], list[Bucket]] = {}
    for bucket in buckets:
        found.setdefault((bucket.rows, bucket.sizes), []).append(bucket)
    return tuple(
        Bucket(
            rows,
            max(one.compile_seconds for one in same),
            # 0 means that the warm-up measured nothing.
            min((one.seconds for one in same if one.seconds), default=0.0),
            sizes,
            # Each worker measures on its own.
            min((one.split_rows for one in same if one.split_rows), default=0),
        )
        for (rows, sizes), same in found.items()
    )


# --- States ---


def fold_states(states: States) -> tuple[str, str]:
    """Merge the state and reason of a version from all workers.

    It is READY if every worker reports READY. Unless all workers give the same reason, each reason
    is shown with the name of its worker.
    """
    lowest = min((state for state, _ in states.values()), key=lambda state: _GRAVITY[state])
    reasons = {worker: reason for worker, (_, reason) in states.items() if reason}
    if len(reasons) == len(states) and len(set(reasons.values())) == 1:
        return lowest, next(iter(reasons.values()))
    return lowest, "; ".join(f"worker {worker}: {reason}" for worker, reason in reasons.items())


def fold_index(answers: Mapping[str, Sequence[IndexEntry]]) -> list[IndexEntry]:
    """Merge the repository indexes of all workers; `answers` maps worker names to indexes.

    A version that a worker does not know counts as UNAVAILABLE there.
    """
    known = {
        worker: {(row.name, row.version): (row.state, row.reason) for row in rows}
        for worker, rows in answers.items()
    }
    return [
        IndexEntry(*key, *fold_states(of_each(known, key))) for key in versions_of(known.values())
    ]


def of_each(known: Mapping[str, Mapping[Key, tuple[str, str]]], key: Key) -> States:
    """Return a version's state and reason in each worker."""
    absent = (State.UNAVAILABLE.public, NOT_LOADED)
    name, _ = key
    return {
        # A model that was never loaded has a row without version, which may have a reason.
        worker: rows.get(key) or rows.get((name, "")) or absent
        for worker, rows in known.items()
    }


def versions_of(known: Iterable[Iterable[Key]]) -> list[Key]:
    """List the versions known to any worker, and models for which no worker knows a version."""
    keys = {key for each in known for key in each}
    loaded = {name for name, version in keys if version}
    return sorted((key for key in keys if key[1] or key[0] not in loaded), key=_ascending)


def _ascending(key: Key) -> tuple[str, int]:
    name, version = key
    return name, int(version or 0)
