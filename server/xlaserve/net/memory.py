"""Pool of buffers for long messages.

Reuse pays off because page faults in fresh memory cost more than copying the message.
"""

import gc
import mmap
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Octets: TypeAlias = npt.NDArray[np.uint8]

SMALLEST_BYTES = 1 << 20
"""Smaller buffers come from the heap, which reuses memory itself."""
_LEAST_HUGE_BYTES = 32 << 20
"""Buffers from this size on use huge pages, which save thousands of page faults. Smaller ones do
not, because the first access to a huge page blocked for 1 to 5 ms on a virtual machine."""
_STEP_BYTES = 1 << 16
"""Sizes are rounded up to a multiple of this, because similar messages differ by their ids."""
_MOST_TIMES_LARGER = 2
"""Maximum ratio of a reused buffer's size to the requested size."""


def fresh(size: int) -> Octets:
    """Allocate a buffer; a long one is returned to the operating system when freed.

    Long buffers are mapped separately, because malloc would keep memory freed by a thread.
    """
    if size < SMALLEST_BYTES:
        return np.empty(size, np.uint8)
    # MAP_PRIVATE, because Python's default is shared memory, which has no huge pages.
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        # Opt out explicitly for small buffers: with transparent_hugepage=always, all get them.
        is_huge = size >= _LEAST_HUGE_BYTES
        mapped.madvise(mmap.MADV_HUGEPAGE if is_huge else mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapped, np.uint8)


class MessageMemory:
    """Lends buffers, and takes them back when they are no longer referenced.

    At most `limit` bytes of free buffers are kept. When a new buffer is allocated, free ones that
    are too small for it are dropped, so the pool does not increase the memory for messages of
    similar size.
    """

    def __init__(self, limit: int, now: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._now = now
        self._spare: dict[int, tuple[float, Octets]] = {}
        """Free buffers by `id`, with the time of their return. Any thread or the garbage collector
        may add one at any time, so iterate only over a copy, which is made atomically.
        """
        self._lent: set[int] = set()
        """`id` of each buffer that is in use."""

    @property
    def spare_bytes(self) -> int:
        """Return the number of bytes kept for reuse."""
        return sum(block.nbytes for _, block in self._spare.copy().values())

    def take(self, size: int) -> Octets:
        """Return a buffer of `size` bytes; it is reused after the last view of it is gone."""
        if size < SMALLEST_BYTES or size > self._limit:
            return fresh(size)
        block = self._fitting(size)
        if block is None and self._lent:
            # JAX releases zero-copy inputs at its next call or at a garbage collection.
            gc.collect(0)
            block = self._fitting(size)
        if block is None:
            self._drop(lambda since, block: block.nbytes < size)
            block = fresh(-(-size // _STEP_BYTES) * _STEP_BYTES)
        # Wrap a memoryview: numpy makes views of a slice refer to the block instead of the slice.
        lent = np.frombuffer(block.data, np.uint8, size)
        weakref.finalize(lent, self._take_back, block).atexit = False
        self._lent.add(id(block))
        return lent

    def _fitting(self, size: int) -> Octets | None:
        # Prefer the buffer returned last, which may still be in the CPU caches.
        for key, (_, block) in reversed(self._spare.copy().items()):
            if size <= block.nbytes <= size * _MOST_TIMES_LARGER:
                del self._spare[key]
                return block
        return None

    def _take_back(self, block: Octets) -> None:
        self._lent.discard(id(block))
        if self.spare_bytes + block.nbytes <= self._limit:
            self._spare[id(block)] = self._now(), block

    def drop(self) -> None:
        """Free all unused buffers."""
        self._drop(lambda since, block: True)

    def drop_unused(self, seconds: float) -> None:
        """Free the buffers that have been unused for `seconds`."""
        oldest = self._now() - seconds
        self._drop(lambda since, block: since < oldest)

    def _drop(self, which: Callable[[float, Octets], bool]) -> None:
        for key, (since, block) in self._spare.copy().items():
            if which(since, block):
                self._spare.pop(key, None)
