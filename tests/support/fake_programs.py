"""The programs of a generator in plain Python: a token follows from all rows that it sees."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xlaserve.models.generation.programs import Step

VOCAB, LENGTH, WINDOWS, CHUNK = 97, 24, (8, 24), 4
PADDING = -1
"""What the rows hold that a chunk has written behind its last token."""


def following(tokens: Sequence[int]) -> int:
    """Return the token that follows from all of these."""
    found = 7
    for token in tokens:
        found = (31 * found + token + 1) % 1_000_003
    return found % VOCAB


def alone(prompt: Sequence[int], count: int) -> list[int]:
    """Return what a request is given that has the model for itself."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count and len(tokens) <= LENGTH:
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


class FakePrograms:
    """A cache of tokens: rows that nobody wrote, or padding, are seen by no step."""

    busy_ns = 0

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.chunks: list[int] = []
        """The slot of each chunk that was computed."""
        self.steps = 0
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

    def step(self, window: int, integers: Any, reals: Any, mask: Any = None) -> Step:
        self.steps += 1
        tokens = np.zeros(self._slots, np.int32)
        for slot, (token, position, is_active, *_) in enumerate(integers.tolist()):
            if not is_active:
                assert position >= LENGTH, "an idle slot would overwrite a row"
                continue
            assert position < window, "attention would not see its own row"
            self.rows[slot][position] = token
            seen = self.rows[slot][: position + 1]
            assert PADDING not in seen, "a step sees padding"
            tokens[slot] = following(seen)
        zeros = np.zeros((self._slots, 1), np.float32)
        return Step(tokens, zeros[:, 0], tokens[:, None], zeros)
