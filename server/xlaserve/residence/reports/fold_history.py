"""Merges the histories of several workers into one for the server."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from xlaserve.residence.reports.history import Buckets, HistorySnapshot, Sample, VersionSample
from xlaserve.serving.observability.failures import KEPT

_Key = tuple[str, str]


def fold_histories(answers: Sequence[HistorySnapshot]) -> HistorySnapshot:
    """Merge histories by the clock of the longest-running worker.

    Each of its samples is added to the latest earlier samples of the other workers. A worker that
    started later contributes nothing before its start.
    """
    eldest = max(answers, key=lambda each: each.seconds)
    others = [each for each in answers if each is not eldest]
    failures = sorted(
        (failure for each in answers for failure in each.failures), key=lambda one: -one.at_ns
    )
    return HistorySnapshot(
        eldest.seconds,
        _together(eldest.recent, [_Side(o.recent, eldest.seconds - o.seconds) for o in others]),
        _together(eldest.hour, [_Side(o.hour, eldest.seconds - o.seconds) for o in others]),
        failures[:KEPT],
    )


def _together(samples: Sequence[Sample], others: "Sequence[_Side]") -> list[Sample]:
    sides = [_Side(samples, 0.0), *others]
    return [_sum([side.at(sample.at) for side in sides]) for sample in samples]


class _Seen(NamedTuple):
    """The last sample of one worker, and the last counts of versions that it does not list."""

    sample: Sample | None
    known: Mapping[_Key, VersionSample]
    """The last sample of each version so far. For a version first sampled later it is that first
    sample, so that its counts start from there."""


class _Side:
    """The samples of one worker, read in ascending order of time."""

    def __init__(self, samples: Sequence[Sample], began: float) -> None:
        """`began` is when the worker started, by the clock of the longest-running worker."""
        self._samples = samples
        self._began = began
        self._times = [sample.at + began for sample in samples]
        self._taken = 0
        self._known: dict[_Key, VersionSample] = {}
        for sample in reversed(samples):
            self._known |= _by_key(sample)

    def at(self, moment: float) -> _Seen:
        """Return the worker's last sample before a given time."""
        count = bisect_right(self._times, moment)
        for sample in self._samples[self._taken : count]:
            self._known |= _by_key(sample)
        self._taken = max(self._taken, count)
        if count:
            return _Seen(self._samples[count - 1], dict(self._known))
        # Earlier samples were dropped. The first one kept is used, or its counts would appear as
        # new.
        first = self._samples[0] if self._samples and moment > self._began else None
        return _Seen(first, dict(self._known))


def _by_key(sample: Sample) -> dict[_Key, VersionSample]:
    return {(one.name, one.version): one for one in sample.models}


def _sum(seen: Sequence[_Seen]) -> Sample:
    """Merge the workers' samples of one moment. The first worker always has one."""
    samples = [each.sample for each in seen if each.sample is not None]
    keys = dict.fromkeys(key for sample in samples for key in _by_key(sample))
    of_samples = [each.known for each in seen if each.sample is not None]
    return Sample(
        samples[0].at,
        sum(sample.success for sample in samples),
        sum(sample.fail for sample in samples),
        _added(sample.buckets for sample in samples),
        _counted(sample.failures for sample in samples),
        sum(sample.used_bytes for sample in samples),
        _counted(sample.devices for sample in samples),
        [_version([known[key] for known in of_samples if key in known]) for key in keys],
        _added(sample.lag for sample in samples),
        sum(sample.lag_seconds for sample in samples),
        sum(sample.pending for sample in samples),
        max(sample.oldest_seconds for sample in samples),
    )


def _version(found: Sequence[VersionSample]) -> VersionSample:
    if len(found) == 1:
        return found[0]
    sizes = [one.size_bytes for one in found if one.size_bytes is not None]
    return VersionSample(
        found[0].name,
        found[0].version,
        sum(one.success for one in found),
        sum(one.fail for one in found),
        _added(one.buckets for one in found),
        sum(sizes) if sizes else None,
        _counted(one.devices for one in found),
    )


def _added(buckets: Iterable[Buckets]) -> Buckets:
    return tuple(map(sum, zip(*buckets, strict=True)))


def _counted(counts: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    return total
