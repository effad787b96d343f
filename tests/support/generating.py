"""A model that gives many answers to one request, and lets tests hold it and count them."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xlaserve.runtime import identity
from xlaserve.runtime.identity import IdentityModel
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import Answer, Value
from xlaserve.tensors import Parameter

PREFIX = "count"
"""What the names of the models that count begin with; others stay identities."""
_HELD_SECONDS = 240
"""Longest time for which a test may hold an answer; then something hangs."""
IN_ORDER = "_in_order"
"""What the names of those end with that do not say that they are decoupled."""


class Generation:
    """What tests know of the answers of all models that count."""

    def __init__(self) -> None:
        self.computed = 0
        """Answers, of all requests together."""
        self.begun = 0
        """Requests whose first answer was asked for."""
        self.ended = 0
        """Requests whose answers were computed to the end, or not wanted any more."""
        self.may_go_on = threading.Event()
        """Cleared to hold every answer but the first of each request."""
        self.may_go_on.set()
        self._counting = threading.Lock()
        """Requests begin and end in threads of their own, and `+=` is more than one step."""

    def answers(self, count: int, size: int) -> Iterator[Answer]:
        with self._counting:
            self.begun += 1
        try:
            for number in range(count):
                if number:
                    assert self.may_go_on.wait(_HELD_SECONDS)
                with self._counting:
                    self.computed += 1
                yield Answer({"y": np.full(size, number, np.float32)})
        finally:
            with self._counting:
                self.ended += 1


class CountingModel(IdentityModel):
    """Answers `x = [count, size]` with as many tensors of that size: of 0, of 1, and so on.

    A negative number of them fails after the first.
    """

    def __init__(self, model: IdentityModel, generation: Generation) -> None:
        super().__init__(model.info)
        self._generation = generation

    def generate(
        self, inputs: Mapping[str, Value], parameters: Mapping[str, Parameter], *, replica: int = 0
    ) -> Iterator[Answer]:
        x: Any = inputs["x"]
        count, size = map(int, x)
        yield from self._generation.answers(abs(count) if count > 0 else 1, size)
        if count < 0:
            raise ArithmeticError("it cannot count so far")


def install(patch: pytest.MonkeyPatch) -> Generation:
    """Have models of some names count, as long as the patch holds."""
    generation, load = Generation(), identity.load

    def load_counting(directory: Path, context: LoadContext) -> IdentityModel:
        model = load(directory, context)
        if not context.model.startswith(PREFIX):
            return model
        model.info = replace(model.info, is_decoupled=not context.model.endswith(IN_ORDER))
        return CountingModel(model, generation)

    patch.setattr(identity, "load", load_counting)
    return generation
