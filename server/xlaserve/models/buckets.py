"""The batch sizes that a model is compiled for."""

from bisect import bisect_left
from collections.abc import Sequence

DEFAULT_MAX_BATCH_SIZE = 64
"""Where there is a batch and nothing says how large it may be; 12 buckets."""

MAX_BATCH_SIZE = 65_536
"""The largest batch that a model may ask to be compiled for; 32 buckets."""


def buckets_up_to(max_batch_size: int) -> tuple[int, ...]:
    """Return powers of two and their midpoints, 1 2 3 4 6 8 12 16 24 ..., and the maximum itself.

    No request is padded by more than half of its rows, for two executables per doubling.
    """
    sizes = {max_batch_size}
    power = 1
    while power < max_batch_size:
        sizes |= {power, power + power // 2}
        power *= 2
    return tuple(sorted(size for size in sizes if size <= max_batch_size))


def bucket_for(buckets: Sequence[int], rows: int) -> int:
    """Return the smallest bucket that holds so many rows; ValueError where none does."""
    index = bisect_left(buckets, rows)
    if index == len(buckets):
        raise ValueError(f"{rows} rows, but the largest bucket has {buckets[-1]}")
    return buckets[index]
