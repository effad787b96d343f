"""The queue of a model with priority levels, or with timeouts that requests differ in."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from xlaserve.errors import Overloaded
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.stations.batching import BatchPolicy, Fit, fitting

_MICROSECOND_NS = 1000
_LEFT_BEHIND = 64
"""Stale deadlines, besides as many as wait, before a sweep."""


@dataclass(frozen=True, slots=True)
class LevelPolicy:
    """The queue policy of one level (ModelQueuePolicy)."""

    max_requests: int
    """Limit of queued requests of the level."""
    setting: str = "max_requests_per_model"
    """Source of `max_requests`, for the text of Overloaded."""
    timeout_ns: int = 0
    """Longest wait of a request; 0 for as long as its client does."""
    may_shorten: bool = False
    """Whether a request's shorter `timeout` counts."""
    delays: bool = False
    """Whether a request that has expired goes behind those of its level, instead of being refused:
    it is executed when none of them waits, and does not expire again."""


class _Level:
    """Requests of one level: those in time, then the delayed ones."""

    __slots__ = ("delayed", "in_time", "policy")

    def __init__(self, policy: LevelPolicy) -> None:
        self.policy = policy
        # Ordered dicts, which find the first entry at once however many before it were removed.
        self.in_time: OrderedDict[InferCall, None] = OrderedDict()
        self.delayed: OrderedDict[InferCall, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.in_time) + len(self.delayed)


class PriorityQueue:
    """Requests by their level, 1 being the first to leave, and in each in the order they came.

    A level waits for as long as there are requests of those above it: its timeout bounds that.
    """

    def __init__(
        self,
        model: str,
        policy: BatchPolicy,
        levels: Sequence[LevelPolicy],
        default_level: int,
        max_rows: Callable[[], int],
        *,
        fit: Fit = fitting,
    ) -> None:
        """`levels` are the policies from level 1 on; one where the model has no levels.

        `fit` chooses the requests of a batch.
        """
        self._model = model
        self.policy = policy
        self._levels = [_Level(one) for one in levels]
        self._default = default_level
        self._max_rows = max_rows
        self._fit = fit
        self._level_of: dict[InferCall, _Level] = {}
        """Queued requests."""
        self._deadlines: list[tuple[int, int, InferCall]] = []
        """A heap, with deadlines of requests that have left."""
        self._added = 0
        """Requests so far: equal deadlines are in their order."""

    def __len__(self) -> int:
        return len(self._level_of)

    def __iter__(self) -> Iterator[InferCall]:
        return iter(self._level_of)

    def add(self, request: InferCall) -> None:
        """Let a request wait in its level, or raise Overloaded at once."""
        level = self._level(request)
        policy = level.policy
        if len(level) >= policy.max_requests:
            raise Overloaded(self._model, policy.max_requests, policy.setting)
        level.in_time[request] = None
        self._level_of[request] = level
        timeout_ns = self.timeout_ns(request)
        if timeout_ns:
            self._added += 1
            deadline = (request.submitted_ns + timeout_ns, self._added, request)
            heapq.heappush(self._deadlines, deadline)
            if len(self._deadlines) > 2 * len(self) + _LEFT_BEHIND:
                self._sweep()

    def _level(self, request: InferCall) -> _Level:
        asked = request.parameters.get("priority", 0)
        # That of a step of an ensemble was checked for no model: beyond the levels it has none.
        inside = isinstance(asked, int) and 1 <= asked <= len(self._levels)
        return self._levels[(int(asked) if inside else self._default) - 1]

    @property
    def first_level(self) -> int:
        """Return the level of the next request, counted from 1; 0 if none is queued."""
        return next((number for number, level in enumerate(self._levels, 1) if len(level)), 0)

    def timeout_ns(self, request: InferCall) -> int:
        """Return the queue timeout of a request; 0 for none."""
        policy = self._level(request).policy
        if policy.may_shorten:
            asked = request.parameters.get("timeout", 0)
            own = asked * _MICROSECOND_NS if isinstance(asked, int) else 0
            return min(own or policy.timeout_ns, policy.timeout_ns or own)
        return policy.timeout_ns

    def remove(self, request: InferCall) -> None:
        """Dequeue a cancelled request; one that has left is ignored."""
        level = self._level_of.pop(request, None)
        if level is not None:
            level.in_time.pop(request, None)
            level.delayed.pop(request, None)

    def clear(self) -> list[InferCall]:
        """Dequeue and return all requests, in order."""
        waiting = list(self._in_order())
        for request in waiting:
            self.remove(request)
        self._deadlines.clear()
        return waiting

    def _in_order(self) -> Iterator[InferCall]:
        for level in self._levels:
            yield from level.in_time
            yield from level.delayed

    def take(self, now_ns: int, *, others_first: bool = False) -> list[InferCall]:
        """Return the requests of the next batch, or none if it should wait for more.

        They are the first request of the first level and those after it, of all levels in their
        order, that fit beside it.
        """
        if not self._level_of:
            return []
        chosen, full = self._fit(self._in_order(), self._max_rows(), others_first)
        if not full and self.policy.delay_ns and not self._overdue(now_ns):
            rows = sum(request.rows for request in chosen)
            sizes = [size for size in self.policy.preferred_rows if size <= rows]
            if not sizes:
                return []
            chosen, _ = self._fit(self._in_order(), sizes[-1], others_first)
        for request in chosen:
            self.remove(request)
        return chosen

    def _overdue(self, now_ns: int) -> bool:
        return now_ns - self._oldest_ns() >= self.policy.delay_ns

    def _oldest_ns(self) -> int:
        parts = [part for level in self._levels for part in (level.in_time, level.delayed) if part]
        return min(next(iter(part)).submitted_ns for part in parts)

    def expire(self, now_ns: int) -> list[InferCall]:
        """Dequeue and return expired requests, or delay them, by level."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, _, request = heapq.heappop(self._deadlines)
            level = self._level_of.get(request)
            if level is None:
                continue
            if level.policy.delays:
                del level.in_time[request]
                level.delayed[request] = None
            else:
                self.remove(request)
                expired.append(request)
        return expired

    def due_ns(self, *, could_leave: bool) -> int | None:
        """Return the time of the next check without other events."""
        if not self._level_of:
            return None
        self._drop_left()
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self.policy.delay_ns and could_leave:
            times.append(self._oldest_ns() + self.policy.delay_ns)
        return min(times, default=None)

    def _drop_left(self) -> None:
        while self._deadlines and self._deadlines[0][2] not in self._level_of:
            heapq.heappop(self._deadlines)

    def _sweep(self) -> None:
        """Forget deadlines of requests that have left, which a long timeout would keep."""
        self._deadlines = [entry for entry in self._deadlines if entry[2] in self._level_of]
        heapq.heapify(self._deadlines)
