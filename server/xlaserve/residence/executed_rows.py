"""Executions and padding of a version by bucket, over all of its instances."""

from collections.abc import Iterable, Mapping, Sequence

from xlaserve.serving.statistics import Totals


class ExecutedRows:
    """Attributes executions to the buckets of the instance that they were counted for.

    Another instance may have other buckets: what was counted before it keeps those of its time, so
    that no count ever falls.
    """

    __slots__ = ("_buckets", "_padding", "_settled")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self._padding = 0
        self._settled: dict[int, int] = {}
        """Executions by their rows that the two above have."""

    def settle(self, totals: Totals, sizes: Sequence[int]) -> None:
        """Attribute executions so far to buckets of these sizes, ascending, for good."""
        self._buckets, self._padding = self._with(totals, sizes)
        self._settled = {one.batch_size: one.compute_infer.count for one in totals.batches}

    def by_bucket(self, totals: Totals, sizes: Sequence[int]) -> Mapping[int, int]:
        """Return the executions of all instances by bucket; the last one has these sizes."""
        return self._with(totals, sizes)[0]

    def padding(self, totals: Totals, sizes: Sequence[int]) -> int:
        """Return the number of padding rows."""
        return self._with(totals, sizes)[1]

    def _with(self, totals: Totals, sizes: Sequence[int]) -> tuple[dict[int, int], int]:
        buckets, padding = dict(self._buckets), self._padding
        for bucket, count, rows in rows_by_bucket(totals, sizes):
            new = count - self._settled.get(rows, 0)
            if new or bucket in buckets:
                buckets[bucket] = buckets.get(bucket, 0) + new
                padding += new * (bucket - rows)
        return buckets, padding


def rows_by_bucket(totals: Totals, sizes: Sequence[int]) -> Iterable[tuple[int, int, int]]:
    """Yield the bucket that batches of each size are executed in, how many, and the size."""
    for batch in totals.batches:
        rows = batch.batch_size
        # Of an instance before this one there may be larger ones; other models have no padding.
        bucket = next((size for size in sizes if size >= rows), rows)
        yield bucket, batch.compute_infer.count, rows
