"""Repeatable options of the form NAME=SIZE."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from xlaserve.errors import InvalidRequest

_Value = TypeVar("_Value")


def pairs_of(
    flag: str,
    texts: Sequence[str] | None,
    read: Callable[[str], _Value],
    expected: str = "NAME=SIZE",
) -> dict[str, _Value]:
    """Return the values that an option was given by name; raises InvalidRequest."""
    found = {}
    for text in texts or ():
        # Names may contain the sign, sizes do not.
        name, _, value = text.rpartition("=")
        try:
            found[name] = read(value)
        except ValueError:
            raise InvalidRequest(f"{flag}: expected {expected}, got '{text}'") from None
    return found


def sizes_of(text: str) -> tuple[int, ...]:
    """Return sizes that are separated by commas, each once; raises ValueError."""
    sizes = tuple(map(int, text.split(",")))
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise ValueError
    return sizes
