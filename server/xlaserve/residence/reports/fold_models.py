"""Merges several workers' answers about their models."""

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
"""States as the index names them: that with the lowest number is the one of all workers."""

Key = tuple[str, str]
"""A model and its version."""

States = Mapping[str, tuple[str, str]]
"""State and reason of a version, by worker."""


# --- statistics ---


def fold_reports(answers: Iterable[Sequence[VersionReport]]) -> list[VersionReport]:
    """Return one report for each version: counts, durations and memory of all workers added up."""
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
    """Return each bucket once: its slowest compilation, and its quickest execution."""
    found: dict[tuple[int, tuple[int, ...]], list[Bucket]] = {}
    for bucket in buckets:
        found.setdefault((bucket.rows, bucket.sizes), []).append(bucket)
    return tuple(
        Bucket(
            rows,
            max(one.compile_seconds for one in same),
            # Where the warm-up measured nothing it is 0.
            min((one.seconds for one in same if one.seconds), default=0.0),
            sizes,
            # Each worker has measured by itself.
            min((one.split_rows for one in same if one.split_rows), default=0),
        )
        for (rows, sizes), same in found.items()
    )


# --- states ---


def fold_states(states: States) -> tuple[str, str]:
    """Return the state and the reason of a version, from those that each worker has.

    It is READY when it is in all of them. Reasons that are not those of all name their worker.
    """
    lowest = min((state for state, _ in states.values()), key=lambda state: _GRAVITY[state])
    reasons = {worker: reason for worker, (_, reason) in states.items() if reason}
    if len(reasons) == len(states) and len(set(reasons.values())) == 1:
        return lowest, next(iter(reasons.values()))
    return lowest, "; ".join(f"worker {worker}: {reason}" for worker, reason in reasons.items())


def fold_index(answers: Mapping[str, Sequence[IndexEntry]]) -> list[IndexEntry]:
    """Return the repository index of all workers; `answers` has that of each, by its name.

    A version that a worker does not know is UNAVAILABLE there.
    """
    known = {
        worker: {(row.name, row.version): (row.state, row.reason) for row in rows}
        for worker, rows in answers.items()
    }
    return [
        IndexEntry(*key, *fold_states(of_each(known, key))) for key in versions_of(known.values())
    ]


def of_each(known: Mapping[str, Mapping[Key, tuple[str, str]]], key: Key) -> States:
    """Return the state and the reason that a version has in each worker."""
    absent = (State.UNAVAILABLE.public, NOT_LOADED)
    name, _ = key
    return {
        # The row of a model that was never loaded has no version, and may say why.
        worker: rows.get(key) or rows.get((name, "")) or absent
        for worker, rows in known.items()
    }


def versions_of(known: Iterable[Iterable[Key]]) -> list[Key]:
    """List the versions known to any worker; a versionless model only without them."""
    keys = {key for each in known for key in each}
    loaded = {name for name, version in keys if version}
    return sorted((key for key in keys if key[1] or key[0] not in loaded), key=_ascending)


def _ascending(key: Key) -> tuple[str, int]:
    name, version = key
    return name, int(version or 0)
