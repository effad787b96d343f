"""Prefix reuse: finds cached rows of earlier prompts in slots."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from xlaserve.tensors import Tensor

LEAST = 16
"""Minimum length of a reused prefix in tokens, or the chunk size if that is smaller."""

_NOTHING = -1
"""Not a token id; marks slots with too few rows in `_beginnings`."""


class CachedRows(NamedTuple):
    """Cached rows that match the beginning of a prompt."""

    slot: int
    rows: int
    """Number of rows, from the first position on."""


class Prefixes:
    """The tokens whose rows are in each slot's cache. Used by one thread.

    A row depends only on the tokens up to its position, so cached rows can be reused by any prompt
    that begins with the same tokens. Reuse is limited to the same principal: a faster first token
    would reveal that another caller has sent the prefix.
    """

    def __init__(self, slots: int, chunk: int) -> None:
        self.least = min(LEAST, chunk)
        self._tokens: list[Tensor] = [np.zeros(0, np.int32)] * slots
        self._owners = [""] * slots
        self._beginnings = np.full((slots, self.least), _NOTHING, np.int32)
        self._used = [0] * slots
        """Time of last use per slot, counted by `_now`; 0 for never."""
        self._now = 0

    def clear(self) -> None:
        """Drop the records of all slots."""
        for slot in range(len(self._tokens)):
            self.drop(slot)

    def drop(self, slot: int) -> None:
        """Drop the record of a slot whose rows will be overwritten."""
        self._tokens[slot] = self._tokens[slot][:0]
        self._owners[slot] = ""
        self._beginnings[slot] = _NOTHING
        self._used[slot] = 0

    def hold(self, slot: int, tokens: Tensor, owner: str) -> None:
        """Record the tokens of a slot's rows, from the first row on."""
        if len(tokens) < self.least:
            self.drop(slot)
            return
        self._tokens[slot], self._owners[slot] = tokens, owner
        self._beginnings[slot] = tokens[: self.least]
        self.touch(slot)

    def touch(self, slot: int) -> None:
        """Mark a slot as the most recently used."""
        self._now += 1
        self._used[slot] = self._now

    def beyond(self, found: CachedRows) -> int:
        """Return the number of the slot's rows after the matching ones."""
        return len(self._tokens[found.slot]) - found.rows

    def oldest(self, slots: Iterable[int]) -> int:
        """Return the least recently used slot."""
        return min(slots, key=self._used.__getitem__)

    def find(self, tokens: Tensor, owner: str, slots: Iterable[int]) -> CachedRows | None:
        """Return the longest matching prefix in one of the slots; None if it is too short.

        Never includes the last token of the prompt, which must be computed to get its logits.
        """
        if len(tokens) <= self.least:
            return None
        same = (self._beginnings == tokens[: self.least]).all(axis=1)
        found = [
            CachedRows(slot, _common(self._tokens[slot], tokens[:-1]))
            for slot in slots
            if same[slot] and self._owners[slot] == owner
        ]
        return max(found, key=lambda one: one.rows, default=None)


def _common(one: Tensor, other: Tensor) -> int:
    """Return the length of the common prefix."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count
