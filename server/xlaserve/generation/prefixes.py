"""Prompt prefixes whose cache rows are still in slots, and the search for them."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from xlaserve.tensors import Tensor

LEAST = 16
"""Shortest reused prefix in tokens; a smaller chunk suffices."""

_NOTHING = -1
"""No token: slots with fewer than the least have it in their beginnings."""


class Found(NamedTuple):
    """Rows that a prompt begins with."""

    slot: int
    rows: int
    """How many, from the first position on."""


class Prefixes:
    """The rows of all slots, by the tokens that they are of. One thread calls it.

    The row of a position is a function of the tokens up to it, so that rows which were computed for
    one prompt are those of every other that begins with the same tokens. They are found only for
    the principal that sent them: a faster first token would reveal that another caller has sent
    this prefix.
    """

    def __init__(self, slots: int, chunk: int) -> None:
        self.least = min(LEAST, chunk)
        self._tokens: list[Tensor] = [np.zeros(0, np.int32)] * slots
        self._owners = [""] * slots
        self._beginnings = np.full((slots, self.least), _NOTHING, np.int32)
        self._used = [0] * slots
        """Last use of each slot's rows, by `_now`; 0 for never."""
        self._now = 0

    def clear(self) -> None:
        """Forget all rows."""
        for slot in range(len(self._tokens)):
            self.drop(slot)

    def drop(self, slot: int) -> None:
        """Forget the rows of a slot before they are overwritten."""
        self._tokens[slot] = self._tokens[slot][:0]
        self._owners[slot] = ""
        self._beginnings[slot] = _NOTHING
        self._used[slot] = 0

    def hold(self, slot: int, tokens: Tensor, owner: str) -> None:
        """Note that the rows of a slot, from the first on, are those of these tokens."""
        if len(tokens) < self.least:
            self.drop(slot)
            return
        self._tokens[slot], self._owners[slot] = tokens, owner
        self._beginnings[slot] = tokens[: self.least]
        self.touch(slot)

    def touch(self, slot: int) -> None:
        """Note that the rows of a slot were of use."""
        self._now += 1
        self._used[slot] = self._now

    def beyond(self, found: Found) -> int:
        """Return the number of a slot's rows after the matching ones."""
        return len(self._tokens[found.slot]) - found.rows

    def oldest(self, slots: Iterable[int]) -> int:
        """Return the slot whose rows were of use the longest time ago, or never."""
        return min(slots, key=self._used.__getitem__)

    def find(self, tokens: Tensor, owner: str, slots: Iterable[int]) -> Found | None:
        """Return the most rows in one of the slots that a prompt begins with; None for too few.

        Never those of all its tokens: the last one has to be computed, for what follows it.
        """
        if len(tokens) <= self.least:
            return None
        same = (self._beginnings == tokens[: self.least]).all(axis=1)
        found = [
            Found(slot, _common(self._tokens[slot], tokens[:-1]))
            for slot in slots
            if same[slot] and self._owners[slot] == owner
        ]
        return max(found, key=lambda one: one.rows, default=None)


def _common(one: Tensor, other: Tensor) -> int:
    """Return how many tokens are the same from the first on."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count
