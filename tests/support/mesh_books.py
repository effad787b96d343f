"""The sequential bookkeeping of a mesh about one runtime: how much memory it believes is free."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support import mesh
from support.mesh import Mesh, Outcome

Choose = Callable[[Sequence[str]], str]
"""Chooses the model to evict; the candidates are in load order."""


def first(loaded: Sequence[str]) -> str:
    """Evict the oldest model; among models sharing a program, it is the one charged for it."""
    return loaded[0]


def any_of(chance: random.Random) -> Choose:
    """Evict a random model."""
    return chance.choice


@dataclass
class MeshBooks:
    """Loads models like a mesh: predict the size, evict until it fits, load, record the size."""

    mesh: Mesh
    capacity_bytes: int
    paths: Mapping[str, Path]
    choose: Choose = first
    told: dict[str, int] = field(default_factory=dict)
    evicted: list[str] = field(default_factory=list)
    after_each: Callable[["MeshBooks"], None] = lambda books: None
    """Called after each load and each eviction."""

    @property
    def believed_bytes(self) -> int:
        """Return the sum of the reported sizes."""
        return sum(self.told.values())

    async def load(self, model: str) -> Outcome:
        """Evict until the model fits, load it, and return the outcome."""
        path = self.paths[model]
        predicted = (await self.mesh.predict(model, path)).sizeInBytes
        while self.told and self.believed_bytes + predicted > self.capacity_bytes:
            await self.evict(self.choose(list(self.told)))
        loading = self.mesh.load(model, path)
        ended = await mesh.outcome(loading)
        if ended[0] == "OK":
            self.told[model] = (await loading).sizeInBytes
        else:
            await self.mesh.unload(model)
        while self.believed_bytes > self.capacity_bytes:
            await self.evict(self.choose([one for one in self.told if one != model]))
        self.after_each(self)
        return ended

    async def evict(self, model: str) -> None:
        """Unload a model and subtract its reported size."""
        await self.mesh.unload(model)
        del self.told[model]
        self.evicted.append(model)
        self.after_each(self)
