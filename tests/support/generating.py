"""A decoupled model whose answers a test can hold back and count."""

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
"""Name prefix of the models that count; other models stay identity models."""
_HELD_SECONDS = 240
"""Maximum time in seconds for which a test may hold an answer."""
IN_ORDER = "_in_order"
"""Name suffix of the models that are not declared decoupled."""


class Generation:
    """Counters over all counting models, and an event that holds answers back."""

    def __init__(self) -> None:
        self.computed = 0
        """Number of answers computed, over all requests."""
        self.begun = 0
        """Number of requests whose first answer was requested."""
        self.ended = 0
        """Number of requests that were completed or abandoned."""
        self.may_go_on = threading.Event()
        """Clear it to hold back every answer but the first of each request."""
        self.may_go_on.set()
        self._counting = threading.Lock()
        """Requests run in different threads, and `+=` is not atomic."""

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
    """Answers `x = [count, size]` with `count` tensors of that size, filled with 0, 1, and so
    on.

    A negative count fails after the first answer.
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
    """Make models with the prefix count while the monkeypatch lasts."""
    generation, load = Generation(), identity.load

    def load_counting(directory: Path, context: LoadContext) -> IdentityModel:
        model = load(directory, context)
        if not context.model.startswith(PREFIX):
            return model
        model.info = replace(model.info, is_decoupled=not context.model.endswith(IN_ORDER))
        return CountingModel(model, generation)

    patch.setattr(identity, "load", load_counting)
    return generation
