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
    """Parse the values of an option by name; raises InvalidRequest."""
    found = {}
    for text in texts or ():
        # Names may contain an equals sign, sizes do not.
        name, _, value = text.rpartition("=")
        try:
            found[name] = read(value)
        except ValueError:
            raise InvalidRequest(f"{flag}: expected {expected}, got '{text}'") from None
    return found


def sizes_of(text: str) -> tuple[int, ...]:
    """Parse distinct, comma-separated sizes; raises ValueError."""
    sizes = tuple(map(int, text.split(",")))
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise ValueError
    return sizes
