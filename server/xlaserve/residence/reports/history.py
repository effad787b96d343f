"""An hour of the server in bounded memory: counts by time, and rates from them."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from xlaserve.concurrency.in_turns import in_turns
from xlaserve.residence.capacity import Capacity
from xlaserve.residence.registry import Registry, Version
from xlaserve.serving.access.sight import Sees
from xlaserve.serving.observability.failures import FailedCall, Failures, of_anybody
from xlaserve.serving.observability.loop_lag import LoopLag
from xlaserve.serving.stations.backlog import NO_BACKLOG, Backlog
from xlaserve.serving.statistics import REQUEST_BOUNDS_NS

RECENT_SECONDS = 1.0
RECENT_SAMPLES = 120
"""Two minutes, second by second, as the status page draws them."""
HOUR_SECONDS = 10.0
HOUR_SAMPLES = 360
MAX_MODELS = 16
"""Model versions of one sample: those with the most requests since the one before; beside them it
has those of the sample after it, of which it is the beginning."""
_MANY_VERSIONS = 1000
"""Above this many versions, samples are ten times less frequent."""

Buckets = tuple[int, ...]
_NO_REQUESTS = (0,) * (len(REQUEST_BOUNDS_NS) + 1)


class VersionSample(NamedTuple):
    """One model version at a moment."""

    name: str
    version: str
    success: int
    fail: int
    buckets: Buckets
    """Successful requests between the bounds of REQUEST_BOUNDS_NS, and above the last."""
    size_bytes: int | None
    """Its memory; None unless loaded."""
    devices: Mapping[str, int]
    """The same by device, if known."""


_Known = dict[tuple[str, str], VersionSample]


class Sample(NamedTuple):
    """The server at a moment. All counts are those since the start."""

    at: float
    """Seconds since the start of the server."""
    success: int
    fail: int
    buckets: Buckets
    failures: Mapping[str, int]
    """Failures of all operations by their reason."""
    used_bytes: int
    devices: Mapping[str, int]
    """Memory that models have reserved, by device."""
    models: Sequence[VersionSample]
    lag: Buckets
    """Looks at the event loop by its lag: between the bounds of LAG_BOUNDS, and above the last."""
    lag_seconds: float
    """Sum of all lags."""
    pending: int
    """Queued executions of all versions at that moment."""
    oldest_seconds: float
    """Age of the oldest in seconds, or 0."""


class HistorySnapshot(NamedTuple):
    """The history of one process or of all at a moment."""

    seconds: float
    """Its uptime in seconds."""
    recent: Sequence[Sample]
    hour: Sequence[Sample]
    failures: Sequence[FailedCall]
    """The last ones, the newest first."""


class History:
    """Takes samples of the registry; of the event loop.

    Its size is that of RECENT_SAMPLES and HOUR_SAMPLES samples with twice MAX_MODELS versions
    each, whatever the number of requests and models.
    """

    def __init__(
        self,
        registry: Registry,
        capacity: Capacity,
        failures: Failures,
        lag: LoopLag | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`lag` is the event loop's, and `now_ns` the clock of the stations."""
        self._registry = registry
        self._capacity = capacity
        self.failures = failures
        """The last failures, one by one."""
        self._lag = lag or LoopLag()
        self._clock = clock
        self._now_ns = now_ns
        self._started = clock()
        self.recent: deque[Sample] = deque(maxlen=RECENT_SAMPLES)
        """Samples of the last two minutes, the oldest first."""
        self.hour: deque[Sample] = deque(maxlen=HOUR_SAMPLES)
        """Samples of the last hour, the oldest first."""
        self._looking = asyncio.Lock()
        self._known: _Known = {}
        """The last reading of every version."""
        self._known_of_hour: _Known = {}
        """The same at the last sample of the hour."""

    @property
    def seconds(self) -> float:
        """Return how long it has run."""
        return self._clock() - self._started

    def snapshot(self) -> HistorySnapshot:
        """Return everything as it is now."""
        last = self.failures.last
        return HistorySnapshot(self.seconds, tuple(self.recent), tuple(self.hour), last)

    async def look(self) -> None:
        """Take a sample, unless the last one is as good as one of now."""
        async with self._looking:
            if self.recent and self.seconds - self.recent[-1].at < RECENT_SECONDS / 2:
                return
            async for _ in in_turns(self._steps()):
                pass

    async def watch(self) -> None:
        """Take samples until cancelled."""
        while True:
            await self.look()
            many = len(self._known) > _MANY_VERSIONS
            await asyncio.sleep(HOUR_SECONDS if many else RECENT_SECONDS)

    def take(self) -> None:
        """Take one sample at once."""
        deque(self._steps(), maxlen=0)

    def _steps(self) -> Iterator[None]:
        """Take one sample, a step for each model; concurrent readers get the previous one."""
        before, known_now = self._known, _Known()
        active: list[tuple[int, VersionSample]] = []
        waiting = NO_BACKLOG
        success = fail = 0
        buckets = [0] * (len(REQUEST_BOUNDS_NS) + 1)
        for model in self._registry.models():
            for version in model.versions.values():
                key = (version.model, version.number)
                known = before.get(key)
                seen = known_now[key] = _sample(version, known)
                success += seen.success
                fail += seen.fail
                if version.instance is not None:
                    backlog = version.instance.backlog(self._now_ns())
                    waiting = Backlog.together([waiting, backlog]) if backlog.pending else waiting
                if seen.success:
                    buckets = list(map(int.__add__, buckets, seen.buckets))
                asked = seen.success + seen.fail
                more = asked - (known.success + known.fail if known else 0)
                if asked or seen.size_bytes is not None:
                    active.append((more, seen))
            yield
        active.sort(key=lambda pair: -pair[0])
        devices = {name: self._capacity.used_on(name) for name in self._capacity.totals}
        sample = Sample(
            self.seconds,
            success,
            fail,
            tuple(buckets),
            dict(self.failures.counts),
            self._capacity.used_bytes,
            devices,
            tuple(seen for _, seen in active[:MAX_MODELS]),
            tuple(self._lag.buckets),
            self._lag.seconds,
            waiting.pending,
            waiting.oldest_seconds,
        )
        _append(self.recent, sample, before)
        self._known = known_now
        if not self.hour or sample.at - self.hour[-1].at >= HOUR_SECONDS - RECENT_SECONDS / 2:
            _append(self.hour, sample, self._known_of_hour)
            self._known_of_hour = known_now


def history_in_sight(history: HistorySnapshot, sees: Sees) -> HistorySnapshot:
    """Return the part of a caller of some models; of the event loop and the queues it has none."""
    return history._replace(
        recent=_samples_in_sight(history.recent, sees),
        hour=_samples_in_sight(history.hour, sees),
        failures=[of_anybody(one) for one in history.failures if one.model and sees(one.model)],
    )


def _samples_in_sight(samples: Sequence[Sample], sees: Sees) -> list[Sample]:
    """Return samples of some models; a version counts on where busier ones took its place.

    Sums would jump by all its requests otherwise. Before its first sample it counts as in that.
    """
    # Their order would tell which of the others had more requests.
    seen: list[_Known] = [
        {(one.name, one.version): one for one in sorted(sample.models) if sees(one.name)}
        for sample in samples
    ]
    known: _Known = {}
    for here in reversed(seen):
        known |= here
    counts = [0] * (2 + len(_NO_REQUESTS))
    for one in known.values():
        counts = list(map(int.__add__, counts, _counts(one)))
    found = []
    for sample, here in zip(samples, seen, strict=True):
        for key, one in here.items():
            if one is not known[key]:
                more = map(int.__sub__, _counts(one), _counts(known[key]))
                counts = list(map(int.__add__, counts, more))
        known |= here
        # A sample with room for more has all that was loaded: the others held nothing.
        held = here if len(sample.models) < MAX_MODELS else known
        found.append(_of_some(sample, list(here.values()), counts, held))
    return found


def _counts(version: VersionSample) -> tuple[int, ...]:
    return version.success, version.fail, *version.buckets


def _of_some(
    sample: Sample, models: Sequence[VersionSample], counts: Sequence[int], held: _Known
) -> Sample:
    success, fail, *buckets = counts
    return Sample(
        sample.at,
        success,
        fail,
        tuple(buckets),
        {},
        sum(one.size_bytes or 0 for one in held.values()),
        {},
        models,
        lag=(),
        lag_seconds=0.0,
        pending=0,
        oldest_seconds=0.0,
    )


def _append(samples: deque[Sample], sample: Sample, known: _Known) -> None:
    """Add a sample; the one before it gets the counts of its versions, as they were known then.

    A version that nobody had asked by then, or that was not there, had none: what is asked of a
    model before the first look at it counts too.
    """
    if samples:
        there = {(one.name, one.version) for one in samples[-1].models}
        missing = [one for one in sample.models if (one.name, one.version) not in there]
        began = [known.get((one.name, one.version)) or _unasked(one) for one in missing]
        samples[-1] = samples[-1]._replace(models=(*samples[-1].models, *began))
    samples.append(sample)


def _unasked(version: VersionSample) -> VersionSample:
    return VersionSample(version.name, version.version, 0, 0, _NO_REQUESTS, None, {})


def _sample(version: Version, before: VersionSample | None) -> VersionSample:
    """Return a version as it is; the same object as before where nothing has changed."""
    statistics, instance = version.statistics, version.instance
    memory = None if instance is None else instance.info.memory
    size = None if memory is None else memory.total_bytes
    success, fail = statistics.success.count, statistics.fail_count
    if before is not None and (success, fail, size) == (
        before.success,
        before.fail,
        before.size_bytes,
    ):
        return before
    devices = {} if memory is None else dict(memory.per_device)
    buckets = statistics.request_buckets
    return VersionSample(version.model, version.number, success, fail, buckets, size, devices)
