"""The books of a mesh over one runtime, one step after the other: what it believes to be free."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support import mesh
from support.mesh import Mesh, Outcome

Choose = Callable[[Sequence[str]], str]
"""Chooses which of the loaded models is evicted, those that were loaded first in front."""


def first(loaded: Sequence[str]) -> str:
    """Evict the model that was loaded first: of those of one computation, the one that carries."""
    return loaded[0]


def any_of(chance: random.Random) -> Choose:
    """Evict any model."""
    return chance.choice


@dataclass
class MeshBooks:
    """Predicts, then evicts until the prediction fits, then loads, and counts what it was told."""

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
        """Return what it believes to be held."""
        return sum(self.told.values())

    async def load(self, model: str) -> Outcome:
        """Make room for a model and load it; return how that ended."""
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
        """Unload a model and believe to be free what was told of it."""
        await self.mesh.unload(model)
        del self.told[model]
        self.evicted.append(model)
        self.after_each(self)
