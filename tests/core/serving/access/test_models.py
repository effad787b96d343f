"""Names and patterns of models in rules."""

import pytest

from xlaserve.errors.access import NotPermitted
from xlaserve.serving.access.models import MOST_CHARACTERS, CallerSight, ModelNames
from xlaserve.serving.call import Operation
from xlaserve.serving.standing import Standing, State


@pytest.mark.parametrize(
    ("texts", "names", "others"),
    [
        (["a"], ["a"], ["", "A", "ab", "a ", "a\n", "\na"]),
        (["a-*"], ["a-", "a-1", "a-\n", "a-x/y"], ["a", "ba-1", "A-1"]),
        (["a?"], ["ab", "a\n"], ["a", "abc"]),
        (["[ab]1", "c"], ["a1", "b1", "c"], ["c1", "[ab]1 ", "1"]),
        (["a.b"], ["a.b"], ["axb"]),
        (["*"], ["", "a", "x" * MOST_CHARACTERS], ["x" * (MOST_CHARACTERS + 1)]),
        (["x" * (MOST_CHARACTERS + 1)], ["x" * (MOST_CHARACTERS + 1)], ["x"]),
        (["*" * 30 + "b"], ["b", "aab"], ["a" * MOST_CHARACTERS]),
        ([], [], ["", "a"]),
    ],
)
def test_patterns_are_as_of_a_shell(texts: list[str], names: list[str], others: list[str]) -> None:
    """The whole name is compared, case-sensitively; text without a wildcard matches only itself."""
    found = ModelNames(texts)

    assert all(name in found for name in names)
    assert not any(name in found for name in others)


def test_a_model_that_is_known_for_something_else_is_refused_openly() -> None:
    sight = CallerSight(
        "c",
        Operation.INFER,
        ModelNames(["a"]),
        ModelNames(["a", "b"]),
        Standing(State.SETTLED),
    )

    assert sight.permits("a")
    assert not sight.permits("c")
    assert [True, False, False] == [sight.shows(name) for name in "abc"]
    with pytest.raises(NotPermitted, match="caller 'c' may not infer model 'b'"):
        sight.permits("b")
    with pytest.raises(NotPermitted, match="caller 'c' may not infer the whole server"):
        sight.refuse_server()
