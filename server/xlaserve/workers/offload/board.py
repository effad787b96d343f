"""The shared-memory board of all workers: idle ones, and batches begun."""

import mmap
import os

_WORD_BYTES = 8
_IDLE = 0
"""The first word of a row; the others are of the workers that it executes batches for."""


class WorkerBoard:
    """A row for each worker, which it alone writes; every word is written and read as a whole.

    What a worker has written outlives it: the others learn which batches it had begun.
    """

    def __init__(self, descriptor: int, processes: int) -> None:
        """Take a descriptor that `create` has returned, with the same number."""
        self.descriptor = descriptor
        self._width = 1 + processes
        self._words = memoryview(mmap.mmap(descriptor, _size(processes))).cast("q")

    @classmethod
    def create(cls, processes: int) -> "WorkerBoard":
        """Return a board on which nobody is idle, for the parent; raises OSError."""
        descriptor = os.memfd_create("xlaserve-workers")
        os.ftruncate(descriptor, _size(processes))
        return cls(descriptor, processes)

    def is_idle(self, worker: int) -> bool:
        """Tell whether a worker would execute a batch of another one."""
        return self._words[worker * self._width + _IDLE] != 0

    def say_idle(self, worker: int, is_idle: bool) -> None:
        """Say whether a worker is idle; the parent says of one that died that it is not."""
        self._words[worker * self._width + _IDLE] = is_idle

    def begin(self, worker: int, owner: int, number: int) -> None:
        """Say that a worker begins the batch of an owner that has this number."""
        self._words[worker * self._width + 1 + owner] = number

    def begun(self, worker: int, owner: int) -> int:
        """Return the number of the last batch of an owner that a worker has begun."""
        return self._words[worker * self._width + 1 + owner]


def _size(processes: int) -> int:
    return processes * (1 + processes) * _WORD_BYTES
