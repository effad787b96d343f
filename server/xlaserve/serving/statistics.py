"""Counters and durations of a model version, shown in ModelStatistics and /metrics."""

import asyncio
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from xlaserve import errors
from xlaserve.serving.observability.exemplar import Exemplar

REQUEST_BOUNDS_NS = tuple(
    round(milliseconds * 1_000_000)
    for milliseconds in (
        *(0.05, 0.1, 0.25, 0.5),
        *(1, 2.5, 5, 10, 25, 50, 100, 250, 500),
        *(1000, 2500, 10_000),
    )
)
"""Upper bounds of the request histogram's buckets; an additional last bucket has no bound."""

EXACT_ROWS = 64
"""Batch sizes up to this have their own statistics; larger ones are rounded up to the next power of
two, which bounds the memory that clients can make the server use.
"""


class FailureReason(StrEnum):
    """Why a request for an existing model failed."""

    REJECTED = "rejected"
    """A limit was reached, or the server was draining."""
    INVALID = "invalid"
    """The request does not match the model."""
    CANCELLED = "cancelled"
    """The client disconnected, or its deadline passed."""
    BACKEND = "backend"
    """The model failed."""


REASONS: Mapping[type[BaseException], FailureReason] = MappingProxyType(
    {
        errors.Overloaded: FailureReason.REJECTED,
        errors.BudgetExhausted: FailureReason.REJECTED,
        errors.ShuttingDown: FailureReason.REJECTED,
        # Only raised for steps of ensembles: the model of the request itself exists.
        errors.ModelNotFound: FailureReason.REJECTED,
        errors.ModelNotReady: FailureReason.REJECTED,
        errors.InvalidRequest: FailureReason.INVALID,
        errors.Unsupported: FailureReason.INVALID,
        errors.TooLarge: FailureReason.INVALID,
        errors.BodyTimeout: FailureReason.INVALID,
        asyncio.CancelledError: FailureReason.CANCELLED,
        errors.DeadlineExceeded: FailureReason.CANCELLED,
        GeneratorExit: FailureReason.CANCELLED,
        BaseException: FailureReason.BACKEND,
    }
)
"""Looked up along the MRO: a subclass without a row has its parent's."""


def reason_of(error: BaseException) -> FailureReason:
    """Return the reason of the error's class, or of its nearest ancestor that has one."""
    return next(REASONS[kind] for kind in type(error).__mro__ if kind in REASONS)


@dataclass(frozen=True, slots=True)
class StatisticDuration:
    """A number of events and their total time."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Execution times of one batch size (InferBatchStatistics)."""

    batch_size: int
    """Exact up to EXACT_ROWS, then rounded up to a power of two."""
    compute_input: StatisticDuration
    compute_infer: StatisticDuration
    compute_output: StatisticDuration


@dataclass(frozen=True, slots=True)
class Offloads:
    """Batches of a model version offloaded to other workers."""

    batches: int = 0
    """Batches executed by other workers."""
    bytes: int = 0
    """Tensor bytes of the offloaded batches, in both directions."""
    refused: int = 0
    """Batches refused by other workers and executed locally."""
    lost: int = 0
    """Batches lost because the other worker died."""

    def __add__(self, other: "Offloads") -> "Offloads":
        return Offloads(
            self.batches + other.batches,
            self.bytes + other.bytes,
            self.refused + other.refused,
            self.lost + other.lost,
        )


NO_OFFLOADS = Offloads()


@dataclass(frozen=True, slots=True)
class Totals:
    """Snapshot of a model version's statistics (InferStatistics)."""

    success: StatisticDuration
    """Successful requests, timed from the lookup of the model to the response."""
    fail: StatisticDuration
    queue: StatisticDuration
    """Queueing time; like the following fields, of successful requests only."""
    compute_input: StatisticDuration
    """Validating and decoding inputs."""
    compute_infer: StatisticDuration
    """Execution, including transfers to and from the device."""
    compute_output: StatisticDuration
    """Time from the end of the execution to the response."""
    cache_hit: StatisticDuration
    """Successful cache lookups; these requests count as successes too."""
    cache_miss: StatisticDuration
    """Failed cache lookups, including insertion of the answers."""
    inference_count: int
    """Rows executed; a request to a model without batches counts as one."""
    execution_count: int
    last_inference_ms: int
    """Milliseconds since the epoch; 0 if there was none."""
    batches: tuple[BatchStatistics, ...]
    """Statistics by batch size, ascending."""
    failures: Mapping[FailureReason, int]
    request_buckets: tuple[int, ...]
    """Successful requests per bucket of REQUEST_BOUNDS_NS; the last has no upper bound."""
    offloads: Offloads = NO_OFFLOADS


@dataclass(slots=True)
class _Executions:
    """Sums over the requests of one batch size; `total_ns` minus the other times is output time."""

    count: int = 0
    total_ns: int = 0
    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    executions: int = 0
    """Number of executions, each of which may serve several requests."""
    executed_ns: int = 0

    @property
    def output_ns(self) -> int:
        return self.total_ns - self.queue_ns - self.input_ns - self.infer_ns


class Timed(Protocol):
    """An executed request, as seen by the statistics."""

    @property
    def rows(self) -> int:
        """Return the request's own rows."""
        ...

    @property
    def started_ns(self) -> int:
        """Return the time at which the request's model was found."""
        ...

    @property
    def submitted_ns(self) -> int:
        """Return the time at which the request's inputs were ready."""
        ...


class Run(Protocol):
    """An execution of one or more requests."""

    @property
    def begun_ns(self) -> int:
        """Return the time at which the execution began."""
        ...

    @property
    def ended_ns(self) -> int:
        """Return the time at which the execution ended."""
        ...


class Outcome(Protocol):
    """How a request was answered from another request's execution."""

    @property
    def hit_ns(self) -> int | None:
        """Return the duration of a successful cache lookup, or None."""
        ...

    @property
    def miss_ns(self) -> int | None:
        """Return the duration of a failed cache lookup plus the insertion, or None."""
        ...


@dataclass(slots=True)
class _Cached:
    """Response-cache sums of a model."""

    hits: int = 0
    hit_ns: int = 0
    total_ns: int = 0
    """Total request time of the hits, from the lookup of the model."""
    misses: int = 0
    miss_ns: int = 0


class VersionStatistics:
    """Counters of one model version. Belongs to the event loop.

    Its size does not depend on the number or contents of requests.
    """

    __slots__ = (
        "_batches",
        "_cached",
        "_exemplars",
        "_fail_ns",
        "_failures",
        "_inference_count",
        "_last_ns",
        "_loaded_ns",
        "_request_buckets",
        "load_failures",
        "load_seconds",
        "loads",
        "offloads",
        "unloads",
    )

    def __init__(self) -> None:
        self._batches: dict[int, _Executions] = {}
        self._cached = _Cached()
        self._request_buckets = [0] * (len(REQUEST_BOUNDS_NS) + 1)
        self._exemplars: dict[int, Exemplar] = {}
        self._failures = dict.fromkeys(FailureReason, 0)
        self._fail_ns = 0
        self._inference_count = 0
        self._last_ns = 0
        self._loaded_ns = 0
        self.loads = 0
        self.load_failures = 0
        self.unloads = 0
        self.offloads = NO_OFFLOADS
        """Offloaded batches; updated by the offloading runner."""
        self.load_seconds = 0.0
        """Duration of the last successful load."""

    def succeeded(self, request: Timed, run: Run, ended: int, now_ns: int) -> None:
        """Count a request that was executed alone; `now_ns` is the time since the epoch."""
        rows, started, submitted = request.rows, request.started_ns, request.submitted_ns
        begun = run.begun_ns
        infer_ns, total_ns = run.ended_ns - begun, ended - started
        batch = self._batches.get(rows) or self._executions(rows)
        batch.count += 1
        batch.total_ns += total_ns
        batch.queue_ns += begun - submitted
        batch.input_ns += submitted - started
        batch.infer_ns += infer_ns
        batch.executions += 1
        batch.executed_ns += infer_ns
        self._inference_count += rows
        self._last_ns = now_ns
        self._request_buckets[bisect_left(REQUEST_BOUNDS_NS, total_ns)] += 1

    def succeeded_together(
        self,
        requests: Sequence[Timed],
        batch_rows: int,
        run: Run,
        ended: int,
        now_ns: int,
        *,
        executions: int = 1,
    ) -> None:
        """Count requests answered by one execution.

        `batch_rows` includes the rows of cancelled requests. `executions` is 0 if the execution has
        already been counted.
        """
        count, begun_ns = len(requests), run.begun_ns
        infer_ns = run.ended_ns - begun_ns
        starts = [request.started_ns for request in requests]
        started = sum(starts)
        submitted = sum([request.submitted_ns for request in requests])
        batch = self._executions(batch_rows)
        batch.count += count
        batch.total_ns += count * ended - started
        batch.queue_ns += count * begun_ns - submitted
        batch.input_ns += submitted - started
        batch.infer_ns += count * infer_ns
        batch.executions += executions
        batch.executed_ns += executions * infer_ns
        self._inference_count += sum([request.rows for request in requests])
        self._last_ns = now_ns
        shortest = bisect_left(REQUEST_BOUNDS_NS, ended - max(starts))
        if shortest == bisect_left(REQUEST_BOUNDS_NS, ended - min(starts)):
            self._request_buckets[shortest] += count
            return
        for start in starts:
            self._request_buckets[bisect_left(REQUEST_BOUNDS_NS, ended - start)] += 1

    def executed(self, batch_rows: int, run: Run) -> None:
        """Count an execution none of whose requests has been answered."""
        batch = self._executions(batch_rows)
        batch.executions += 1
        batch.executed_ns += run.ended_ns - run.begun_ns

    def relayed(self, request: Timed, how: Outcome, ended: int, now_ns: int) -> None:
        """Count a request answered from another request's execution.

        For a cache miss only the cache time is counted; the execution is counted with the other
        request.
        """
        cached = self._cached
        if how.miss_ns is not None:
            cached.misses += 1
            cached.miss_ns += how.miss_ns
        if how.hit_ns is not None:
            total_ns = ended - request.started_ns
            cached.hits += 1
            cached.hit_ns += how.hit_ns
            cached.total_ns += total_ns
            self._last_ns = now_ns
            self._request_buckets[bisect_left(REQUEST_BOUNDS_NS, total_ns)] += 1

    def traced(self, trace_id: int, total_ns: int, now_ns: int) -> None:
        """Keep a traced request as the exemplar of its bucket."""
        bucket = bisect_left(REQUEST_BOUNDS_NS, total_ns)
        self._exemplars[bucket] = Exemplar(trace_id, total_ns / 1e9, now_ns / 1e9)

    @property
    def exemplars(self) -> Mapping[int, Exemplar]:
        """Return the last traced request of each histogram bucket, by bucket index."""
        return self._exemplars

    def _executions(self, rows: int) -> _Executions:
        size = rows if rows <= EXACT_ROWS else 1 << (rows - 1).bit_length()
        return self._batches.setdefault(size, _Executions())

    def failed(self, error: BaseException, total_ns: int) -> None:
        """Count a failed request."""
        self._failures[reason_of(error)] += 1
        self._fail_ns += total_ns

    def loaded(self, seconds: float, now_ns: int = 0) -> None:
        """Count a successful load."""
        self.loads += 1
        self.load_seconds = seconds
        self._loaded_ns = now_ns

    @property
    def last_use_ns(self) -> int:
        """Return the time since the epoch of the version's last answer or load."""
        return max(self._last_ns, self._loaded_ns)

    @property
    def success(self) -> StatisticDuration:
        """Return the number and total time of successful requests."""
        batches, cached = self._batches.values(), self._cached
        return StatisticDuration(
            sum(b.count for b in batches) + cached.hits,
            sum(b.total_ns for b in batches) + cached.total_ns,
        )

    @property
    def fail_count(self) -> int:
        """Return the number of failed requests."""
        return sum(self._failures.values())

    @property
    def request_buckets(self) -> tuple[int, ...]:
        """Return `Totals.request_buckets`."""
        return tuple(self._request_buckets)

    @property
    def last_inference_ms(self) -> int:
        """Return `Totals.last_inference_ms`."""
        return self._last_ns // 1_000_000

    def totals(self) -> Totals:
        """Return a snapshot of all statistics."""
        batches = self._batches.values()
        cached = self._cached
        count = sum(b.count for b in batches)
        return Totals(
            success=self.success,
            fail=StatisticDuration(self.fail_count, self._fail_ns),
            queue=StatisticDuration(count, sum(b.queue_ns for b in batches)),
            compute_input=StatisticDuration(count, sum(b.input_ns for b in batches)),
            compute_infer=StatisticDuration(count, sum(b.infer_ns for b in batches)),
            compute_output=StatisticDuration(count, sum(b.output_ns for b in batches)),
            cache_hit=StatisticDuration(cached.hits, cached.hit_ns),
            cache_miss=StatisticDuration(cached.misses, cached.miss_ns),
            inference_count=self._inference_count,
            execution_count=sum(b.executions for b in batches),
            last_inference_ms=self.last_inference_ms,
            batches=tuple(
                BatchStatistics(
                    size,
                    StatisticDuration(batch.executions, batch.input_ns),
                    StatisticDuration(batch.executions, batch.executed_ns),
                    StatisticDuration(batch.executions, batch.output_ns),
                )
                for size, batch in sorted(self._batches.items())
            ),
            failures=MappingProxyType(dict(self._failures)),
            request_buckets=self.request_buckets,
            offloads=self.offloads,
        )
