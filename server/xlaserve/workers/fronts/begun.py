"""A board in shared memory of a front end's requests that the engine has begun."""

import mmap
import os

from xlaserve.python_models.process.slab import make_slab

_WORDS = 4096
_WORD_BYTES = 8


class BegunBoard:
    """An array of words in shared memory that the engine writes and that survive its death.

    The word for a request is at its number modulo `_WORDS`; when a later request reuses the word,
    the earlier one counts as begun. A front end uses the board to decide which requests may be
    retried: never one that may have been executed. Words are written atomically.
    """

    def __init__(self, descriptor: int) -> None:
        """Map the memory of a descriptor from `make`, and close the descriptor."""
        try:
            self._words = memoryview(mmap.mmap(descriptor, _WORDS * _WORD_BYTES)).cast("q")
        finally:
            os.close(descriptor)

    @staticmethod
    def make() -> int:
        """Return the descriptor of a new board, or -1 without memfd; raises OSError."""
        return make_slab(_WORDS * _WORD_BYTES)

    def begin(self, number: int) -> int:
        """Mark a request as begun; returns the old word for `put_back`."""
        before = self._words[number % _WORDS]
        self._words[number % _WORDS] = max(before, number)
        return before

    def put_back(self, number: int, before: int) -> None:
        """Revert a `begin`, because the request was queued instead."""
        self._words[number % _WORDS] = before

    def has_begun(self, number: int) -> bool:
        """Tell whether execution of a request may have begun."""
        return self._words[number % _WORDS] >= number
