"""A queue with priority levels, or with timeouts that differ between requests."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from xlaserve.errors import Overloaded
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.stations.batching import BatchPolicy, Fit, fitting

_MICROSECOND_NS = 1000
_LEFT_BEHIND = 64
"""Number of stale deadlines, beyond the number of queued requests, that triggers a sweep."""


@dataclass(frozen=True, slots=True)
class LevelPolicy:
    """The queue policy of one priority level (ModelQueuePolicy)."""

    max_requests: int
    """Maximum number of queued requests in the level."""
    setting: str = "max_requests_per_model"
    """Setting that `max_requests` comes from, named in the text of Overloaded."""
    timeout_ns: int = 0
    """Queue timeout of requests; 0 for none."""
    may_shorten: bool = False
    """Whether a request's `timeout` parameter may shorten the queue timeout."""
    delays: bool = False
    """Whether expired requests are delayed instead of refused: they run after all others of their
    level, and do not expire again.
    """


class _Level:
    """Queued requests of one level: first those not expired, then the expired ones (delayed)."""

    __slots__ = ("delayed", "in_time", "policy")

    def __init__(self, policy: LevelPolicy) -> None:
        self.policy = policy
        # Ordered dicts find their first entry in constant time, even after many removals.
        self.in_time: OrderedDict[InferCall, None] = OrderedDict()
        self.delayed: OrderedDict[InferCall, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.in_time) + len(self.delayed)


class PriorityQueue:
    """Requests ordered by priority level, 1 first, and by arrival within a level.

    Requests of lower priority wait as long as there are more urgent ones; their timeout limits
    that.
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
        """`levels` has the policies from level 1 on; one policy if the model has no levels.

        `fit` selects the requests of a batch.
        """
        self._model = model
        self.policy = policy
        self._levels = [_Level(one) for one in levels]
        self._default = default_level
        self._max_rows = max_rows
        self._fit = fit
        self._level_of: dict[InferCall, _Level] = {}
        """All queued requests, in arrival order."""
        self._deadlines: list[tuple[int, int, InferCall]] = []
        """A heap that may contain entries of requests that have left the queue."""
        self._added = 0
        """Number of requests added so far; orders equal deadlines by arrival."""

    def __len__(self) -> int:
        return len(self._level_of)

    def __iter__(self) -> Iterator[InferCall]:
        return iter(self._level_of)

    def add(self, request: InferCall) -> None:
        """Enqueue a request in its level; raises Overloaded if the level is full."""
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
        level = request.parameters.get("priority", 0)
        # An ensemble step's priority was not validated for this model: if invalid, use the default.
        inside = isinstance(level, int) and 1 <= level <= len(self._levels)
        return self._levels[(int(level) if inside else self._default) - 1]

    @property
    def first_level(self) -> int:
        """Return the level of the next request, counted from 1; 0 if the queue is empty."""
        return next((number for number, level in enumerate(self._levels, 1) if len(level)), 0)

    def timeout_ns(self, request: InferCall) -> int:
        """Return the queue timeout of a request; 0 if it has none."""
        policy = self._level(request).policy
        if policy.may_shorten:
            timeout = request.parameters.get("timeout", 0)
            own = timeout * _MICROSECOND_NS if isinstance(timeout, int) else 0
            return min(own or policy.timeout_ns, policy.timeout_ns or own)
        return policy.timeout_ns

    def remove(self, request: InferCall) -> None:
        """Remove a cancelled request; does nothing if it has already left the queue."""
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
        """Dequeue and return the next batch; empty if the queue should wait for more requests.

        The batch has the first request of the most urgent level and later ones, of all levels in
        their order, that are compatible with it.
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
        """Dequeue expired requests; return those to refuse, and move the others to the end."""
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
        """Return the time at which the queue must be checked again, or None."""
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
        """Remove stale deadlines, which a long timeout would keep alive."""
        self._deadlines = [entry for entry in self._deadlines if entry[2] in self._level_of]
        heapq.heapify(self._deadlines)
