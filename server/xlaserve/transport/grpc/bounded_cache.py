"""What was made of short keys, kept for the next time, within bounds."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedCache(dict[Key, Value], Generic[Key, Value]):
    """Makes the value of a key that it does not hold; what raises is not kept.

    It starts anew when it is full: a client that sends ever new keys makes others pay for theirs
    once more now and then, but cannot keep them out.
    """

    def __init__(self, make: Callable[[Key], Value], max_cached: int) -> None:
        super().__init__()
        self._make = make
        self._max_cached = max_cached

    # A lookup that succeeds runs no Python at all.
    def __missing__(self, key: Key) -> Value:
        value = self._make(key)
        if len(self) >= self._max_cached:
            self.clear()
        self[key] = value
        return value
