"""Model sizes reported to a mesh, compared with current memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from xlaserve.errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class Holding:
    """The memory of a loaded model, in bytes of the fullest device."""

    held_bytes: int
    alone_bytes: int
    """What it would hold if no other model held a part of it: more than it holds where another
    carries the programs that they share."""
    computation: str = ""
    """Key of models that share parts; empty for a model that shares nothing."""


class ToldSizes:
    """The size in bytes that a mesh was told of each loaded model.

    A mesh hears the size of a model once, when it is loaded, and takes it for free when it has
    evicted it, in whatever order it evicts. But what models share stays while one of them is left.
    So each model is told with all that it may come to carry; then whatever stays is counted with
    each that is left. A model is told with less, as what it adds by itself, where the part that
    another carries fits into `room`: memory that the mesh was not told of. It is taken once for a
    computation, however many models of it were told with less, until the last of those leaves.

    What grows behind a load, beyond that room, is told with the next load, and asked for before it.
    """

    def __init__(
        self, holding: Callable[[str], Holding], room_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        """Count the models of which `holding` says what they hold now; it raises ModelNotFound
        for one that is not loaded."""
        self._holding = holding
        self._room_bytes = room_bytes
        self._told: dict[str, int] = {}

    def tell(self, model_id: str) -> int:
        """Return a loaded model's size, at least 1, and record it as reported."""
        self._told.pop(model_id, None)
        untold, found = self.untold_bytes(), self._holding(model_id)
        self._told[model_id] = found.held_bytes
        if found.alone_bytes > found.held_bytes and self.exposed_bytes() > self._room_bytes():
            self._told[model_id] = found.alone_bytes
        self._told[model_id] = max(1, self._told[model_id] + untold)
        return self._told[model_id]

    def told(self, model_id: str) -> int:
        """Return the size of a loaded model, at least 1: as it was told, and what it holds besides
        that the mesh does not count yet, which is told with this."""
        held = max(1, self._holding(model_id).held_bytes)
        told = self._told.get(model_id, held)
        if model_id in self._told:
            told += min(self.untold_bytes(), max(0, held - told))
            self._told[model_id] = told
        return told

    def of(self, model_id: str) -> int | None:
        """Return the reported size of a model, without reporting more; None for none."""
        return self._told.get(model_id)

    @property
    def total_bytes(self) -> int:
        """Return the sum of reported sizes of loaded models."""
        return sum(self._told[model_id] for model_id, _ in self._loaded())

    def untold_bytes(self) -> int:
        """Return the memory of all models beyond reported sizes and room; at least 0."""
        held = sum(found.held_bytes for _, found in self._loaded())
        return max(0, held - sum(self._told.values()) - self._room_bytes())

    def exposed_bytes(self) -> int:
        """Return the maximum of unreported memory, whichever models leave."""
        exposed: dict[tuple[str, str], int] = {}
        for model_id, found in self._loaded():
            key = (found.computation, "" if found.computation else model_id)
            beyond = found.alone_bytes - self._told[model_id]
            exposed[key] = max(beyond, exposed.get(key, 0))
        return sum(exposed.values())

    def _loaded(self) -> Iterator[tuple[str, Holding]]:
        """Yield loaded models, and forget the others."""
        for model_id in list(self._told):
            try:
                yield model_id, self._holding(model_id)
            except ModelNotFound:
                del self._told[model_id]
