"""Creates the queue that a model's configuration asks for (ModelDynamicBatching)."""

from collections.abc import Callable
from dataclasses import replace

from xlaserve.model_config.config import DynamicBatching, QueuePolicy
from xlaserve.serving.stations.batching import BatchPolicy, BatchQueue, Fit, RequestQueue, fitting
from xlaserve.serving.stations.priorities import LevelPolicy, PriorityQueue

_MICROSECOND_NS = 1000


def is_ruled(wanted: DynamicBatching) -> bool:
    """Tell whether dynamic batching is configured beyond the order of answers.

    Requests then stay in the queue until they are executed: none are handed over in advance.
    """
    return replace(wanted, preserve_ordering=False) != DynamicBatching()


def has_policy(wanted: DynamicBatching) -> bool:
    """Tell whether the configuration sets priorities or a queue policy."""
    return bool(wanted.priority_levels) or wanted.default_queue_policy != QueuePolicy()


def queue_for(
    model: str,
    wanted: DynamicBatching,
    max_queued: int,
    max_rows: Callable[[], int],
    fit: Fit = fitting,
) -> RequestQueue:
    """Return an empty queue; a priority queue only if the configuration needs one.

    All stations with a queue use this function, so that its policies apply everywhere.
    """
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
        return BatchQueue(model, policy, max_rows, fit)
    levels = [
        _level(wanted.priority_queue_policy.get(level, default), max_queued)
        for level in range(1, max(1, wanted.priority_levels) + 1)
    ]
    first = wanted.default_priority_level or 1
    return PriorityQueue(model, policy, levels, first, max_rows, fit=fit)


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
