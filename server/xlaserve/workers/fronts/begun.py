"""The requests of a front end that the engine has begun, in shared memory."""

import mmap
import os

from xlaserve.python_models.process.slab import make_slab

_WORDS = 4096
_WORD_BYTES = 8


class BegunBoard:
    """Words that the engine alone writes, each as a whole, and that outlive it.

    A request has the word of its number, which it shares with those `_WORDS` before and behind it:
    where a later one has taken it, a request counts as begun. Who asks wants to know what may be
    sent again, and that is never one that may have been executed.
    """

    def __init__(self, descriptor: int) -> None:
        """Map a descriptor that `make` has returned, and close it."""
        try:
            self._words = memoryview(mmap.mmap(descriptor, _WORDS * _WORD_BYTES)).cast("q")
        finally:
            os.close(descriptor)

    @staticmethod
    def make() -> int:
        """Return the descriptor of an empty one; -1 where this system has none; raises OSError."""
        return make_slab(_WORDS * _WORD_BYTES)

    def begin(self, number: int) -> int:
        """Say that a request is begun with; return what to `put_back` if it is not after all."""
        before = self._words[number % _WORDS]
        self._words[number % _WORDS] = max(before, number)
        return before

    def put_back(self, number: int, before: int) -> None:
        """Say that a request waits, behind a `begin`."""
        self._words[number % _WORDS] = before

    def has_begun(self, number: int) -> bool:
        """Tell whether a request may have been begun with."""
        return self._words[number % _WORDS] >= number
