"""The last hour of the server in bounded memory: counts by time."""

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
"""Two minutes of samples, one per second, as shown on the status page."""
HOUR_SECONDS = 10.0
HOUR_SAMPLES = 360
MAX_MODELS = 16
"""Maximum number of model versions per sample: those with the most requests since the previous one.
Versions that only the next sample lists are added too, as a base for differences."""
_MANY_VERSIONS = 1000
"""Above this many versions, samples are taken ten times less often."""

Buckets = tuple[int, ...]
_NO_REQUESTS = (0,) * (len(REQUEST_BOUNDS_NS) + 1)


class VersionSample(NamedTuple):
    """The counts of one model version at one moment."""

    name: str
    version: str
    success: int
    fail: int
    buckets: Buckets
    """Number of successful requests by duration, in the intervals of REQUEST_BOUNDS_NS."""
    size_bytes: int | None
    """Memory in bytes; None if not loaded."""
    devices: Mapping[str, int]
    """Memory by device, if known."""


_Known = dict[tuple[str, str], VersionSample]


class Sample(NamedTuple):
    """The server at one moment. All counts start at the start of the server."""

    at: float
    """Uptime of the server in seconds."""
    success: int
    fail: int
    buckets: Buckets
    failures: Mapping[str, int]
    """Failures of all operations, by reason."""
    used_bytes: int
    devices: Mapping[str, int]
    """Memory reserved for models, by device."""
    models: Sequence[VersionSample]
    lag: Buckets
    """Number of lag measurements of the event loop, in the intervals of LAG_BOUNDS."""
    lag_seconds: float
    """Sum of all measured lags."""
    pending: int
    """Queued executions over all versions."""
    oldest_seconds: float
    """How long the oldest execution has been queued, in seconds; 0 if there is none."""


class HistorySnapshot(NamedTuple):
    """The history of one process, or of all processes merged."""

    seconds: float
    """Uptime in seconds."""
    recent: Sequence[Sample]
    hour: Sequence[Sample]
    failures: Sequence[FailedCall]
    """The last failures, newest first."""


class History:
    """Samples the registry periodically. Event loop only.

    Memory is bounded by RECENT_SAMPLES + HOUR_SAMPLES samples with up to twice MAX_MODELS versions
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
        """`lag` measures the event loop, and `now_ns` is the clock of the stations."""
        self._registry = registry
        self._capacity = capacity
        self.failures = failures
        """The most recent failed calls."""
        self._lag = lag or LoopLag()
        self._clock = clock
        self._now_ns = now_ns
        self._started = clock()
        self.recent: deque[Sample] = deque(maxlen=RECENT_SAMPLES)
        """Samples of the last two minutes, oldest first."""
        self.hour: deque[Sample] = deque(maxlen=HOUR_SAMPLES)
        """Samples of the last hour, oldest first."""
        self._sampling = asyncio.Lock()
        self._known: _Known = {}
        """The last sample of every version."""
        self._known_of_hour: _Known = {}
        """The sample of every version at the last entry of `hour`."""

    @property
    def seconds(self) -> float:
        """Return the uptime in seconds."""
        return self._clock() - self._started

    def snapshot(self) -> HistorySnapshot:
        """Return a copy of the samples and failures."""
        last = self.failures.last
        return HistorySnapshot(self.seconds, tuple(self.recent), tuple(self.hour), last)

    async def sample(self) -> None:
        """Take a sample, unless the last one is less than half an interval old."""
        async with self._sampling:
            if self.recent and self.seconds - self.recent[-1].at < RECENT_SECONDS / 2:
                return
            async for _ in in_turns(self._steps()):
                pass

    async def watch(self) -> None:
        """Take samples until cancelled."""
        while True:
            await self.sample()
            many = len(self._known) > _MANY_VERSIONS
            await asyncio.sleep(HOUR_SECONDS if many else RECENT_SECONDS)

    def take(self) -> None:
        """Take one sample without yielding to the event loop."""
        deque(self._steps(), maxlen=0)

    def _steps(self) -> Iterator[None]:
        """Take one sample in steps, one per model; readers see the previous sample meanwhile."""
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
                requests = seen.success + seen.fail
                more = requests - (known.success + known.fail if known else 0)
                if requests or seen.size_bytes is not None:
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
    """Return the history for a caller who may see only some models.

    The lag of the event loop and the queues are left out.
    """
    return history._replace(
        recent=_samples_in_sight(history.recent, sees),
        hour=_samples_in_sight(history.hour, sees),
        failures=[of_anybody(one) for one in history.failures if one.model and sees(one.model)],
    )


def _samples_in_sight(samples: Sequence[Sample], sees: Sees) -> list[Sample]:
    """Return the samples for a caller who may see only some models.

    A version that busier ones displaced from a sample keeps its last counts. Before its first
    sample, it has the counts of that sample. Otherwise the sums would jump by all of its requests.
    """
    # Sorted, since the original order (by requests) could reveal how busy hidden models are.
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
        # A sample with fewer than MAX_MODELS versions lists every loaded one: no other holds
        # memory.
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
    """Append a sample, and add to the previous one the versions that only the new one lists.

    These get their counts at that earlier time, or zero if they were unknown then, so that requests
    made before a model was first sampled are counted.
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
    """Sample a version; returns the previous object if nothing has changed."""
    statistics, instance = version.statistics, version.instance
    memory = None if instance is None else instance.memory
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
