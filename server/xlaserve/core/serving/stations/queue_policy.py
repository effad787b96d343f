"""The queue of a model, as its configuration wants it (ModelDynamicBatching)."""

from collections.abc import Callable

from xlaserve.core.serving.stations.batching import BatchPolicy, BatchQueue, RequestQueue
from xlaserve.core.serving.stations.priorities import LevelPolicy, PriorityQueue
from xlaserve.core.serving.stations.ragged import RaggedQueue
from xlaserve.models.config import DynamicBatching, QueuePolicy
from xlaserve.models.ragged import Ragged

_MICROSECOND_NS = 1000


def queue_for(
    model: str, wanted: DynamicBatching, max_queued: int, max_rows: Callable[[], int]
) -> RequestQueue:
    """Return an empty queue; the one for priorities only where something needs it."""
    default = wanted.default_queue_policy
    is_plain = not (
        wanted.priority_levels or default.allow_timeout_override or default.delays_expired
    )
    policy = BatchPolicy(
        max_requests=default.max_queue_size or max_queued,
        setting=_setting(default),
        preferred_rows=wanted.preferred_batch_size,
        delay_ns=wanted.max_queue_delay_microseconds * _MICROSECOND_NS,
        timeout_ns=default.default_timeout_microseconds * _MICROSECOND_NS,
        timeouts_differ=not is_plain,
    )
    if is_plain:
        return BatchQueue(model, policy, max_rows)
    levels = [
        _level(wanted.priority_queue_policy.get(level, default), max_queued)
        for level in range(1, max(1, wanted.priority_levels) + 1)
    ]
    return PriorityQueue(model, policy, levels, wanted.default_priority_level or 1, max_rows)


def ragged_queue_for(
    model: str,
    runner: Ragged,
    wanted: DynamicBatching,
    max_queued: int,
    max_rows: Callable[[], int],
) -> RaggedQueue:
    """Return an empty queue for requests of different shapes, without priorities."""
    policy = BatchPolicy(
        max_requests=max_queued,
        preferred_rows=wanted.preferred_batch_size,
        delay_ns=wanted.max_queue_delay_microseconds * _MICROSECOND_NS,
    )
    queue = RaggedQueue(model, policy, max_rows)
    queue.model = runner
    return queue


def _level(policy: QueuePolicy, max_queued: int) -> LevelPolicy:
    return LevelPolicy(
        max_requests=policy.max_queue_size or max_queued,
        setting=_setting(policy),
        timeout_ns=policy.default_timeout_microseconds * _MICROSECOND_NS,
        may_shorten=policy.allow_timeout_override,
        delays=policy.delays_expired,
    )


def _setting(policy: QueuePolicy) -> str:
    return "max_queue_size" if policy.max_queue_size else "max_requests_per_model"
