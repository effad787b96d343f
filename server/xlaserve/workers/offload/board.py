"""A board in shared memory of idle workers and of the batches they have begun."""

import mmap
import os

_WORD_BYTES = 8
_IDLE = 0
"""Index of the idle flag in a row. Each other word holds the last batch begun for one worker."""


class WorkerBoard:
    """One row per worker, written only by that worker; words are read and written atomically.

    The board survives a worker's death, so that others know which batches it had begun.
    """

    def __init__(self, descriptor: int, processes: int) -> None:
        """Map a board from the descriptor of `create`; `processes` must be the same."""
        self.descriptor = descriptor
        self._width = 1 + processes
        self._words = memoryview(mmap.mmap(descriptor, _size(processes))).cast("q")

    @classmethod
    def create(cls, processes: int) -> "WorkerBoard":
        """Create a board on which no worker is idle; called by the parent. Raises OSError."""
        descriptor = os.memfd_create("xlaserve-workers")
        os.ftruncate(descriptor, _size(processes))
        return cls(descriptor, processes)

    def is_idle(self, worker: int) -> bool:
        """Tell whether a worker is idle."""
        return self._words[worker * self._width + _IDLE] != 0

    def say_idle(self, worker: int, is_idle: bool) -> None:
        """Set whether a worker is idle; the parent clears the flag of a dead worker."""
        self._words[worker * self._width + _IDLE] = is_idle

    def begin(self, worker: int, owner: int, number: int) -> None:
        """Record that a worker begins a batch of another worker (`owner`)."""
        self._words[worker * self._width + 1 + owner] = number

    def begun(self, worker: int, owner: int) -> int:
        """Return the number of the last batch that a worker began for an owner."""
        return self._words[worker * self._width + 1 + owner]


def _size(processes: int) -> int:
    return processes * (1 + processes) * _WORD_BYTES
