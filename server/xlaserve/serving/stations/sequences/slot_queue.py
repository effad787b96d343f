"""Queue for sequences with fixed batch rows (StrategyDirect)."""

from collections.abc import Iterator, Sequence

from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.stations.batching import BatchPolicy


class SlotQueue:
    """Turns of one replica, at most one per slot (a RequestQueue)."""

    def __init__(self, policy: BatchPolicy, slots: int, utilization: float) -> None:
        """If `utilization` is 0, the batch delay of the policy is ignored."""
        self.policy = policy
        self._wanted = slots * utilization
        self._waiting: list[InferCall] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[InferCall]:
        return iter(self._waiting)

    def add(self, request: InferCall) -> None:
        """Enqueue a turn."""
        self._waiting.append(request)

    def remove(self, request: InferCall) -> None:
        """Remove a cancelled turn; does nothing if it has already left the queue."""
        if request in self._waiting:
            self._waiting.remove(request)

    def clear(self) -> list[InferCall]:
        """Remove and return all turns, in order."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def take(self, now_ns: int, *, others_first: bool = False) -> Sequence[InferCall]:
        """Dequeue the turns with the shape of the oldest one; empty if they should wait.

        They wait up to the batch delay while too few slots are ready (minimum_slot_utilization).
        """
        waiting = self._waiting
        due = self.due_ns(could_leave=True)
        if not waiting or (due is not None and len(waiting) < self._wanted and now_ns < due):
            return []
        key = waiting[0].key
        chosen = [request for request in waiting if request.key == key]
        self._waiting = [request for request in waiting if request.key != key]
        return chosen

    def expire(self, now_ns: int) -> Sequence[InferCall]:
        """Return nothing: turns have no queue timeout."""
        return ()

    def timeout_ns(self, request: InferCall) -> int:
        """Return 0: turns have no queue timeout."""
        return 0

    def due_ns(self, *, could_leave: bool) -> int | None:
        """Return the end of the oldest turn's batch delay; None if there is no delay."""
        if not (self._waiting and could_leave and self._wanted and self.policy.delay_ns):
            return None
        return self._waiting[0].submitted_ns + self.policy.delay_ns
