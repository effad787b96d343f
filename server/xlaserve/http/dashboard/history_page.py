"""The last hour as JSON, for the status page and other clients."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated

import msgspec

from xlaserve.concurrency.others import NOBODY, About, Others, Question
from xlaserve.http.dashboard.permits import Permits, models_shown, permit_everything
from xlaserve.http.messages import HttpRequest, HttpResponse
from xlaserve.http.routing import Body, Route
from xlaserve.residence.reports.fold_history import fold_histories
from xlaserve.residence.reports.history import (
    History,
    HistorySnapshot,
    Sample,
    VersionSample,
    history_in_sight,
)
from xlaserve.serving.access.sight import everything
from xlaserve.serving.call import Operation
from xlaserve.serving.observability.failures import FailedCall
from xlaserve.serving.observability.loop_lag import LAG_BOUNDS
from xlaserve.serving.statistics import REQUEST_BOUNDS_NS

_FRESH = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

Buckets = tuple[int, ...]


class Counts(msgspec.Struct, omit_defaults=True):
    """Counts of a model version since the server started."""

    name: str
    version: str
    success: int = 0
    buckets: Buckets = ()
    fail: int = 0


class Moment(msgspec.Struct):
    """Counts at one moment, as the status page reads them."""

    at_seconds: Annotated[float, msgspec.Meta(description="Seconds since the server started.")]
    success: int
    buckets: Buckets
    models: list[Counts]


class ModelInterval(msgspec.Struct):
    """Activity of a model version in one interval."""

    name: str
    version: str
    requests_per_second: float
    fail: int
    p50_ns: float | None
    p99_ns: float | None
    size_bytes: int | None
    devices: Annotated[Mapping[str, int], msgspec.Meta(description="Memory in bytes, by device.")]


class Interval(msgspec.Struct):
    """Activity between two consecutive samples of the last hour."""

    at_seconds: Annotated[
        float,
        msgspec.Meta(description="End of the interval, in seconds since the server started."),
    ]
    seconds: float
    requests_per_second: Annotated[
        float, msgspec.Meta(description="Completed inference requests per second.")
    ]
    failures: Annotated[
        Mapping[str, int], msgspec.Meta(description="Number of failed operations, by reason.")
    ]
    p50_ns: Annotated[float | None, msgspec.Meta(description="null if there were no requests.")]
    p99_ns: float | None
    used_bytes: int
    devices: Annotated[Mapping[str, int], msgspec.Meta(description="Memory in bytes, by device.")]
    models: Annotated[
        list[ModelInterval], msgspec.Meta(description="The models with the most requests.")
    ]
    lag_mean_seconds: Annotated[
        float | None, msgspec.Meta(description="Mean delay of the event loop, in seconds.")
    ]
    lag_p99_seconds: float | None
    pending: Annotated[
        int, msgspec.Meta(description="Queued executions at the end of the interval.")
    ]
    oldest_seconds: Annotated[
        float, msgspec.Meta(description="Age of the oldest queued execution, in seconds.")
    ]


class HourOfServer(msgspec.Struct):
    """The server's activity in the last hour."""

    now_seconds: Annotated[float, msgspec.Meta(description="Seconds since the server started.")]
    bounds_ns: Buckets
    recent: Annotated[
        list[Moment], msgspec.Meta(description="The last two minutes, one entry per second.")
    ]
    hour: Annotated[
        list[Interval], msgspec.Meta(description="Intervals of the last hour, oldest first.")
    ]
    errors: Annotated[
        Sequence[FailedCall], msgspec.Meta(description="The last 50 failed requests, newest first.")
    ]
    missing: Annotated[
        Mapping[str, str],
        msgspec.Meta(description="Server processes whose data is missing, each with the reason."),
    ]


class HistoryRoutes:
    """The handler of the history."""

    def __init__(
        self, history: History, others: Others = NOBODY, permits: Permits = permit_everything
    ) -> None:
        self._permits = permits
        self._history = history
        self._others = others
        others.answer(Question.HISTORY, self._own)

    def table(self) -> list[Route]:
        """Return the route of the history."""
        return [
            Route(
                "GET",
                "/history.json",
                Operation.PAGE,
                self.show,
                "Rates, latencies, memory and errors of the last hour",
                "people",
                Body(HourOfServer),
            )
        ]

    async def show(self, request: HttpRequest) -> HttpResponse:
        """Return the last hour up to now, with which the page compares later readings."""
        await self._history.sample()
        own = self._history.snapshot()
        replies = await self._others.ask(Question.HISTORY, {}, own, HistorySnapshot)
        history = own
        if len(replies.answers) > 1:
            history = await asyncio.to_thread(fold_histories, list(replies.answers.values()))
        sees = models_shown(self._permits, request.call)
        if sees is not everything:
            history = await asyncio.to_thread(history_in_sight, history, sees)
        hour = []
        for number, (before, after) in enumerate(pairwise(history.hour)):
            if number % _AT_A_TIME == _AT_A_TIME - 1:
                await asyncio.sleep(0)  # yield to requests
            hour.append(_interval(before, after))
        answer = HourOfServer(
            history.seconds,
            REQUEST_BOUNDS_NS,
            [_moment(sample) for sample in history.recent],
            hour,
            history.failures,
            dict(replies.missing) if sees is everything else {},
        )
        return HttpResponse(parts=[msgspec.json.encode(answer)], headers=_FRESH)

    async def _own(self, about: About) -> HistorySnapshot:
        await self._history.sample()
        return self._history.snapshot()


_AT_A_TIME = 30


def _moment(sample: Sample) -> Moment:
    # Include models without requests: rates are differences to the previous sample.
    models = [
        Counts(m.name, m.version, m.success, m.buckets if m.success else (), m.fail)
        for m in sample.models
    ]
    return Moment(sample.at, sample.success, sample.buckets, models)


def _interval(before: Sample, after: Sample) -> Interval:
    seconds = after.at - before.at
    delta = _less(after.buckets, before.buckets)
    lags = _less(after.lag, before.lag)
    samples = sum(lags)
    known = {(each.name, each.version): each for each in before.models}
    failures = {
        reason: more
        for reason, count in after.failures.items()
        if (more := count - before.failures.get(reason, 0))
    }
    return Interval(
        after.at,
        seconds,
        _rate(delta, seconds),
        failures,
        quantile(delta, 0.5),
        quantile(delta, 0.99),
        after.used_bytes,
        after.devices,
        [_of_model(known.get((m.name, m.version)), m, seconds) for m in after.models],
        (after.lag_seconds - before.lag_seconds) / samples if samples else None,
        quantile(lags, 0.99, LAG_BOUNDS),
        after.pending,
        after.oldest_seconds,
    )


def _of_model(before: VersionSample | None, after: VersionSample, seconds: float) -> ModelInterval:
    # A version that was not among the most active has no previous count: report no change.
    first = after if before is None else before
    delta = _less(after.buckets, first.buckets)
    return ModelInterval(
        after.name,
        after.version,
        _rate(delta, seconds),
        max(0, after.fail - first.fail),
        quantile(delta, 0.5),
        quantile(delta, 0.99),
        after.size_bytes,
        after.devices,
    )


def _less(after: Buckets, before: Buckets) -> Sequence[int]:
    """Return the differences; nothing if the counts restarted because the model was forgotten."""
    delta = [new - old for new, old in zip(after, before, strict=True)]
    return delta if min(delta, default=0) >= 0 else [0] * len(delta)


def _rate(delta: Iterable[int], seconds: float) -> float:
    return sum(delta) / seconds if seconds > 0 else 0.0


def quantile(
    buckets: Sequence[int], share: float, bounds: Sequence[float] = REQUEST_BOUNDS_NS
) -> float | None:
    """Return the estimated value at a quantile (`share`), or None if there are no samples.

    The result has the unit of the bucket bounds, by default nanoseconds of request durations. It is
    interpolated linearly within a bucket, as on the status page.
    """
    left = share * sum(buckets)
    if not left:
        return None
    for index, inside in enumerate(buckets):
        if inside and left <= inside:
            low = bounds[index - 1] if index else 0
            if index >= len(bounds):
                return float(low)
            return low + (bounds[index] - low) * left / inside
        left -= inside
    return float(bounds[-1])
