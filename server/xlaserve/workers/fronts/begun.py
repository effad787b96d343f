"""The requests of a front end that the engine has begun, in shared memory."""

import mmap
import os

from xlaserve.python_models.process.slab import make_slab

_WORDS = 4096
_WORD_BYTES = 8


class BegunBoard:
    """Words that only the engine writes, atomically, and that outlive it.

    A request has the word at its number modulo `_WORDS`; once a later request has taken the word,
    the earlier one counts as begun. The board answers which requests may be retried: never one
    that may have been executed.
    """

    def __init__(self, descriptor: int) -> None:
        """Map a descriptor that `make` has returned, and close it."""
        try:
            self._words = memoryview(mmap.mmap(descriptor, _WORDS * _WORD_BYTES)).cast("q")
        finally:
            os.close(descriptor)

    @staticmethod
    def make() -> int:
        """Return the descriptor of an empty board, or -1 without memfd; raises OSError."""
        return make_slab(_WORDS * _WORD_BYTES)

    def begin(self, number: int) -> int:
        """Mark a request as begun; return the value for `put_back`, if it is queued after all."""
        before = self._words[number % _WORDS]
        self._words[number % _WORDS] = max(before, number)
        return before

    def put_back(self, number: int, before: int) -> None:
        """Mark a request as queued, after a `begin`."""
        self._words[number % _WORDS] = before

    def has_begun(self, number: int) -> bool:
        """Tell whether the execution of a request may have begun."""
        return self._words[number % _WORDS] >= number
