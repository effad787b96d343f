"""Random allocations: no two messages share memory, and the kept memory stays bounded."""

from random import Random

import numpy as np
import pytest
from support.clock import HandClock

from xlaserve.net.memory import SMALLEST_BYTES, MessageMemory, Octets

LIMIT = 6 * SMALLEST_BYTES
SIZES = (1, SMALLEST_BYTES - 1, SMALLEST_BYTES, SMALLEST_BYTES + 1, 2 * SMALLEST_BYTES)
LONG = (3 * SMALLEST_BYTES, LIMIT, LIMIT + 1)


class Model:
    """Messages in use, each filled with its own number."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.clock = HandClock()
        self.memory = MessageMemory(LIMIT, self.clock)
        self.used: dict[int, Octets] = {}
        self._number = 0

    def take(self) -> None:
        self._number = (self._number + 1) % 256
        size = self.random.choice((*SIZES, *LONG))
        octets = self.memory.take(size)
        octets.fill(self._number)
        assert size == octets.nbytes
        self.used[self._number] = octets

    def release(self) -> None:
        if self.used:
            del self.used[self.random.choice(sorted(self.used))]

    def keep_a_part(self) -> None:
        """Keep a tensor that refers to a part of a message, and drop the message."""
        if self.used:
            number = self.random.choice(sorted(self.used))
            self.used[number] = self.used[number][self.used[number].nbytes // 2 :]

    def wait(self) -> None:
        self.clock.now += 10
        self.memory.drop_unused(self.random.choice((5, 15)))

    def drop(self) -> None:
        self.memory.drop()
        assert 0 == self.memory.spare_bytes

    def look(self) -> None:
        """Check that each message still has its contents."""
        assert self.memory.spare_bytes <= LIMIT
        for number, octets in self.used.items():
            assert np.all(octets == number), "another message was put there"


STEPS = {Model.take: 5, Model.release: 4, Model.keep_a_part: 1, Model.wait: 1, Model.drop: 1}
"""Weight of each step."""


@pytest.mark.parametrize("seed", range(5))
def test_messages_keep_what_is_theirs(seed: int) -> None:
    random = Random(f"memory {seed}")
    model = Model(random)
    for _ in range(60):
        if len(model.used) > 8:
            model.release()
        (step,) = random.choices(list(STEPS), list(STEPS.values()))
        step(model)
        model.look()
    model.used.clear()
    model.clock.now += 100
    model.memory.drop_unused(50)

    assert 0 == model.memory.spare_bytes
