"""Summation of model version statistics."""

from collections.abc import Callable, Iterable, Sequence

from xlaserve.serving.statistics import (
    NO_OFFLOADS,
    BatchStatistics,
    FailureReason,
    StatisticDuration,
    Totals,
)


def sum_of(readings: Sequence[Totals]) -> Totals:
    """Return the sum of several versions' statistics."""

    def whole(read: Callable[[Totals], StatisticDuration]) -> StatisticDuration:
        found = [read(each) for each in readings]
        return StatisticDuration(sum(d.count for d in found), sum(d.ns for d in found))

    sizes: dict[int, list[BatchStatistics]] = {}
    for each in readings:
        for batch in each.batches:
            sizes.setdefault(batch.batch_size, []).append(batch)
    return Totals(
        success=whole(lambda t: t.success),
        fail=whole(lambda t: t.fail),
        queue=whole(lambda t: t.queue),
        compute_input=whole(lambda t: t.compute_input),
        compute_infer=whole(lambda t: t.compute_infer),
        compute_output=whole(lambda t: t.compute_output),
        cache_hit=whole(lambda t: t.cache_hit),
        cache_miss=whole(lambda t: t.cache_miss),
        inference_count=sum(t.inference_count for t in readings),
        execution_count=sum(t.execution_count for t in readings),
        last_inference_ms=max((t.last_inference_ms for t in readings), default=0),
        batches=tuple(_batch_sum(size, batches) for size, batches in sorted(sizes.items())),
        failures={reason: sum(t.failures[reason] for t in readings) for reason in FailureReason},
        request_buckets=tuple(map(sum, zip(*(t.request_buckets for t in readings), strict=True))),
        offloads=sum((t.offloads for t in readings), start=NO_OFFLOADS),
    )


def _batch_sum(size: int, batches: Sequence[BatchStatistics]) -> BatchStatistics:
    def whole(durations: Iterable[StatisticDuration]) -> StatisticDuration:
        found = list(durations)
        return StatisticDuration(sum(d.count for d in found), sum(d.ns for d in found))

    return BatchStatistics(
        size,
        whole(batch.compute_input for batch in batches),
        whole(batch.compute_infer for batch in batches),
        whole(batch.compute_output for batch in batches),
    )
