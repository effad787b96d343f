"""Random walks over a system and its model, which are compared after each step."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Protocol, TypeVar


class Walker(Protocol):
    """A system with a model to compare it to."""

    random: Random

    def look(self) -> None:
        """Raise AssertionError if system and model differ."""
        ...


_Walker = TypeVar("_Walker", bound=Walker)


def walk(model: _Walker, weights: Mapping[Callable[[_Walker], None], int], steps: int) -> _Walker:
    """Take random steps with these weights and return the walker."""
    for _ in range(steps):
        (step,) = model.random.choices(list(weights), list(weights.values()))
        step(model)
        model.look()
    return model
