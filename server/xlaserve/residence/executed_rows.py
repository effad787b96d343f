"""Counts a version's executions and padding rows by bucket, over all of its instances."""

from collections.abc import Iterable, Mapping, Sequence

from xlaserve.serving.statistics import Totals


class ExecutedRows:
    """Attributes executions to the buckets of the instance that ran them.

    A reload may change the buckets. Executions counted before it keep the old buckets, so that no
    count ever decreases.
    """

    __slots__ = ("_buckets", "_padding", "_settled")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self._padding = 0
        self._settled: dict[int, int] = {}
        """Executions by batch size that `_buckets` and `_padding` already include."""

    def settle(self, totals: Totals, sizes: Sequence[int]) -> None:
        """Attribute the executions so far to buckets of these sizes (ascending), permanently."""
        self._buckets, self._padding = self._with(totals, sizes)
        self._settled = {one.batch_size: one.compute_infer.count for one in totals.batches}

    def by_bucket(self, totals: Totals, sizes: Sequence[int]) -> Mapping[int, int]:
        """Return the number of executions by bucket; `sizes` are the current buckets."""
        return self._with(totals, sizes)[0]

    def padding(self, totals: Totals, sizes: Sequence[int]) -> int:
        """Return the number of padding rows; `sizes` as for `by_bucket`."""
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
    """Yield for each batch size its bucket, the number of executions, and the size."""
    for batch in totals.batches:
        rows = batch.batch_size
        # An earlier instance may have had larger buckets; models without buckets have no padding.
        bucket = next((size for size in sizes if size >= rows), rows)
        yield bucket, batch.compute_infer.count, rows
