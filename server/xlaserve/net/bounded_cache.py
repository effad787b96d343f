"""Bounded caches for values computed from short keys."""

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import Any, Generic, TypeVar, cast

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])


class BoundedCache(dict[Key, Value], Generic[Key, Value]):
    """A dictionary of at most `max_cached` values, which is cleared when it is full.

    A client that keeps sending new keys thus makes other clients' values be recomputed now and
    then, but cannot keep them out of the cache.
    """

    __slots__ = ("_max_cached",)

    def __init__(self, max_cached: int) -> None:
        super().__init__()
        self._max_cached = max_cached

    def keep(self, key: Key, value: Value) -> None:
        """Add a value; clears the cache first if it is full."""
        if len(self) >= self._max_cached:
            self.clear()
        self[key] = value


class MakingCache(BoundedCache[Key, Value]):
    """Computes missing values with a function; exceptions are not cached."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[Key], Value], max_cached: int) -> None:
        super().__init__(max_cached)
        self._make = make

    # A subclass of dict with `__missing__`, because a cache hit then runs no Python code.
    def __missing__(self, key: Key) -> Value:
        value = self._make(key)
        self.keep(key, value)
        return value


def remembered(most_characters: int, most_values: int) -> Callable[[Function], Function]:
    """Decorator that caches a function's results for texts of at most `most_characters`.

    Results for longer texts are not cached, because the ledger does not count this memory.
    """

    def decorate(function: Function) -> Function:
        known: Callable[..., Any] = lru_cache(most_values)(function)

        @wraps(function)
        def find(text: str, *others: Hashable) -> Any:
            return (known if len(text) <= most_characters else function)(text, *others)

        return cast("Function", find)

    return decorate
