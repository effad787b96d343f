"""The programs of a generator in plain Python; each token depends on all visible cache rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xlaserve.generation.step import Step

VOCAB, LENGTH, WINDOWS, CHUNK = 97, 24, (8, 24), 4
PADDING = -1
"""Value of the cache rows that a prefill chunk wrote after its last token."""


def following(tokens: Sequence[int]) -> int:
    """Return the token that follows a sequence."""
    found = 7
    for token in tokens:
        found = (31 * found + token + 1) % 1_000_003
    return found % VOCAB


def alone(prompt: Sequence[int], count: int) -> list[int]:
    """Return the answer to a request that has the model to itself."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count and len(tokens) <= LENGTH:
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


class FakePrograms:
    """A cache of tokens; a step must never see unwritten rows or padding."""

    busy_ns = 0

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.chunks: list[int] = []
        """Slots of the prefill chunks computed so far."""
        self.steps = 0
        self.sizes: set[int] = set()
        """Row counts of the steps so far."""
        self.reset()

    def reset(self) -> None:
        self.rows = [[PADDING] * LENGTH for _ in range(self._slots)]

    def begin(
        self, slot: int, prompt: Any, bias: Mapping[int, float], output: Sequence[int] = ()
    ) -> None:
        """Do nothing: no token depends on the counts."""

    def prefill(self, window: int, tokens: Any, slot: int, start: int, count: int) -> None:
        assert len(tokens) == CHUNK <= window
        assert start + count <= window, "attention would not see all rows"
        assert PADDING not in self.rows[slot][:start], "rows before the chunk are missing"
        self.chunks.append(slot)
        for offset, token in enumerate(tokens[: LENGTH - start]):
            self.rows[slot][start + offset] = int(token) if offset < count else PADDING

    def copy(self, window: int, source: int, target: int) -> None:
        self.rows[target][:window] = self.rows[source][:window]

    def step(
        self, window: int, integers: Any, reals: Any, mask: Any = None, *, slots: Any = None
    ) -> Step:
        self.steps += 1
        rows = range(self._slots) if slots is None else slots.tolist()
        assert len(rows) == len(integers) == len(reals)
        self.sizes.add(len(rows))
        tokens = np.zeros(len(rows), np.int32)
        for row, (token, position, is_active, *_) in enumerate(integers.tolist()):
            if not is_active:
                assert position >= LENGTH, "an idle slot would overwrite a row"
                assert slots is None or rows[row] == self._slots, "padding has a slot"
                continue
            assert position < window, "attention would not see its own row"
            held = self.rows[rows[row]]
            held[position] = token
            seen = held[: position + 1]
            assert PADDING not in seen, "a step sees padding"
            tokens[row] = following(seen)
        zeros = np.zeros((len(rows), 1), np.float32)
        return Step(tokens, zeros[:, 0], tokens[:, None], zeros)
