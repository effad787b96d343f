"""A bounded cache that creates missing entries."""

import pytest

from xlaserve.net.bounded_cache import MakingCache, remembered


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


def test_only_short_texts_are_remembered_and_only_so_many() -> None:
    computed: list[tuple[str, int]] = []

    @remembered(3, 2)
    def joined(text: str, number: int) -> str:
        computed.append((text, number))
        return f"{text}{number}"

    answers = [joined(text, number) for text in ("abc", "abcd") for number in (1, 1, 2)]
    assert ["abc1", "abc1", "abc2", "abcd1", "abcd1", "abcd2"] == answers
    assert [("abc", 1), ("abc", 2), ("abcd", 1), ("abcd", 1), ("abcd", 2)] == computed

    computed.clear()
    for text in ("x", "abc", "x", "y", "abc"):
        joined(text, 1)
    assert [("x", 1), ("abc", 1), ("y", 1), ("abc", 1)] == computed
