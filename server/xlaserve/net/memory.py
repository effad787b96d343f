"""Reused memory of long messages.

Untouched pages cost more than the bytes that are copied into them.
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
"""Bytes below which memory comes from the heap, which reuses its pages itself."""
_LEAST_HUGE_BYTES = 32 << 20
"""Bytes from which memory comes in huge pages, which spare thousands of page faults. To touch one
first took the event loop 1 to 5 ms on a virtual machine; a small one is hardly seen."""
_STEP_BYTES = 1 << 16
"""Granularity of sizes in bytes: messages of one kind differ by their ids."""
_MOST_TIMES_LARGER = 2
"""Maximum ratio of a reused block to its content."""


def fresh(size: int) -> Octets:
    """Return a fresh buffer; long ones are returned to the system once freed.

    They are mapped by themselves: the C library would keep what a thread frees.
    """
    if size < SMALLEST_BYTES:
        return np.empty(size, np.uint8)
    # Python maps shared memory unless it is told otherwise, and that has no huge pages.
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        # A system that is set to `always` has them everywhere unless it is told.
        is_huge = size >= _LEAST_HUGE_BYTES
        mapped.madvise(mmap.MADV_HUGEPAGE if is_huge else mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapped, np.uint8)


class MessageMemory:
    """Lends buffers, and recycles them once they are unreferenced.

    At most `limit` bytes are kept for the next messages. Blocks that are too small for one go when
    it gets a new one, so that messages of one kind never need more than they would without this.
    """

    def __init__(self, limit: int, now: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._now = now
        self._spare: dict[int, tuple[float, Octets]] = {}
        """Free buffers, and since when. Any thread may add one at any time, and so may the garbage
        collector: iterate over a copy only, which is made atomically.
        """
        self._lent: set[int] = set()
        """The blocks that are not back."""

    @property
    def spare_bytes(self) -> int:
        """Return the number of bytes kept for reuse."""
        return sum(block.nbytes for _, block in self._spare.copy().values())

    def take(self, size: int) -> Octets:
        """Return bytes that nothing else uses until the last view of them is gone."""
        if size < SMALLEST_BYTES or size > self._limit:
            return fresh(size)
        block = self._fitting(size)
        if block is None and self._lent:
            # JAX releases what it has read in place with its next call or with a collection.
            gc.collect(0)
            block = self._fitting(size)
        if block is None:
            self._drop(lambda since, block: block.nbytes < size)
            block = fresh(-(-size // _STEP_BYTES) * _STEP_BYTES)
        # Over a memoryview: a view of a plain slice would refer to the block, and not to the slice.
        lent = np.frombuffer(block.data, np.uint8, size)
        weakref.finalize(lent, self._take_back, block).atexit = False
        self._lent.add(id(block))
        return lent

    def _fitting(self, size: int) -> Octets | None:
        # The block that came back last is the one that the caches of the processor may still hold.
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
        """Return all free buffers to the system."""
        self._drop(lambda since, block: True)

    def drop_unused(self, seconds: float) -> None:
        """Return memory that was unused for this long to the system."""
        oldest = self._now() - seconds
        self._drop(lambda since, block: since < oldest)

    def _drop(self, which: Callable[[float, Octets], bool]) -> None:
        for key, (since, block) in self._spare.copy().items():
            if which(since, block):
                self._spare.pop(key, None)
