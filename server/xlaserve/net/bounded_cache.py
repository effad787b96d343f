"""Bounded caches of values that are made from short keys."""

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import Any, Generic, TypeVar, cast

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])


class BoundedCache(dict[Key, Value], Generic[Key, Value]):
    """Holds at most `max_cached` values.

    It starts again when it is full: a client that sends ever new keys makes others pay for theirs
    once more now and then, but cannot keep them out.
    """

    __slots__ = ("_max_cached",)

    def __init__(self, max_cached: int) -> None:
        super().__init__()
        self._max_cached = max_cached

    def keep(self, key: Key, value: Value) -> None:
        """Hold a value until the cache is full."""
        if len(self) >= self._max_cached:
            self.clear()
        self[key] = value


class MakingCache(BoundedCache[Key, Value]):
    """Computes missing values; exceptions are not cached."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[Key], Value], max_cached: int) -> None:
        super().__init__(max_cached)
        self._make = make

    # A lookup that succeeds runs no Python at all.
    def __missing__(self, key: Key) -> Value:
        value = self._make(key)
        self.keep(key, value)
        return value


def remembered(most_characters: int, most_values: int) -> Callable[[Function], Function]:
    """Have a function of a text keep what it makes of those that clients send again and again.

    Nothing is kept of longer texts: that would be memory which nobody counts.
    """

    def decorate(function: Function) -> Function:
        known: Callable[..., Any] = lru_cache(most_values)(function)

        @wraps(function)
        def find(text: str, *others: Hashable) -> Any:
            return (known if len(text) <= most_characters else function)(text, *others)

        return cast("Function", find)

    return decorate
