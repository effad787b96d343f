"""A cache that makes what it lacks and stays small."""

import pytest

from xlaserve.net.bounded_cache import MakingCache


def test_a_value_is_made_once() -> None:
    made: list[str] = []

    def make(key: str) -> int:
        made.append(key)
        return len(key)

    cache = MakingCache(make, 2)

    assert ([3, 3], ["abc"]) == ([cache["abc"], cache["abc"]], made)


def test_it_never_holds_more_than_its_bound() -> None:
    cache = MakingCache(str, 3)
    for key in range(100):
        assert str(key) == cache[key]
        assert len(cache) <= 3


def test_what_cannot_be_made_is_not_kept() -> None:
    cache: MakingCache[str, int] = MakingCache(int, 3)
    with pytest.raises(ValueError, match="invalid literal"):
        _ = cache["x"]

    assert not cache
