"""Random steps of a model beside what it is a model of, which are compared after each."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Protocol, TypeVar


class Walker(Protocol):
    """A model that knows what has to hold."""

    random: Random

    def look(self) -> None:
        """Compare; raises AssertionError."""
        ...


_Walker = TypeVar("_Walker", bound=Walker)


def walk(model: _Walker, weights: Mapping[Callable[[_Walker], None], int], steps: int) -> _Walker:
    """Take so many steps, each as often as its weight says, and return the model."""
    for _ in range(steps):
        (step,) = model.random.choices(list(weights), list(weights.values()))
        step(model)
        model.look()
    return model
