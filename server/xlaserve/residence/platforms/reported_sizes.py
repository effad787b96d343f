"""Model sizes reported to a mesh, compared with the memory they use now."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from xlaserve.errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class Holding:
    """The memory of a loaded model, in bytes of the fullest device."""

    held_bytes: int
    alone_bytes: int
    """Memory that the model would hold if no other model shared its programs. Larger than
    `held_bytes` if another model accounts for shared programs."""
    computation: str = ""
    """Key of models that share programs; empty if the model shares none."""


class ReportedSizes:
    """The size in bytes that was reported to a mesh for each loaded model.

    A mesh learns a model's size once, when the model is loaded, and expects that much memory to be
    free after evicting it, in any order. Memory that models share, however, stays until the last of
    them is unloaded. So each model is normally reported with all memory that it may come to account
    for: whatever stays is then counted with each remaining model.

    A smaller size, without the shared part that another model accounts for, is reported if that
    part fits into `room`, the memory withheld from the mesh. Room is used once per computation,
    until the last model that was reported with less is unloaded.

    Memory that grows after a load, beyond that room, is added to the size reported for the next
    load, and to the prediction before it.
    """

    def __init__(
        self, holding: Callable[[str], Holding], room_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        """`holding` returns a loaded model's memory, or raises ModelNotFound."""
        self._holding = holding
        self._room_bytes = room_bytes
        self._reported: dict[str, int] = {}

    def report(self, model_id: str) -> int:
        """Return the size to report for a newly loaded model, at least 1, and record it."""
        self._reported.pop(model_id, None)
        unreported, found = self.unreported_bytes(), self._holding(model_id)
        self._reported[model_id] = found.held_bytes
        if found.alone_bytes > found.held_bytes and self.exposed_bytes() > self._room_bytes():
            self._reported[model_id] = found.alone_bytes
        self._reported[model_id] = max(1, self._reported[model_id] + unreported)
        return self._reported[model_id]

    def update(self, model_id: str) -> int:
        """Return a loaded model's size for the mesh, at least 1, and record it.

        The size is the one reported before, plus the model's memory that the mesh does not count
        yet.
        """
        held = max(1, self._holding(model_id).held_bytes)
        size = self._reported.get(model_id, held)
        if model_id in self._reported:
            size += min(self.unreported_bytes(), max(0, held - size))
            self._reported[model_id] = size
        return size

    def of(self, model_id: str) -> int | None:
        """Return the size reported for a model, without updating it; None if there is none."""
        return self._reported.get(model_id)

    @property
    def total_bytes(self) -> int:
        """Return the sum of the sizes reported for loaded models."""
        return sum(self._reported[model_id] for model_id, _ in self._loaded())

    def unreported_bytes(self) -> int:
        """Return how much memory models hold beyond reported sizes and room; at least 0."""
        held = sum(found.held_bytes for _, found in self._loaded())
        return max(0, held - sum(self._reported.values()) - self._room_bytes())

    def exposed_bytes(self) -> int:
        """Return the most memory that could go unreported, whichever models are unloaded."""
        exposed: dict[tuple[str, str], int] = {}
        for model_id, found in self._loaded():
            key = (found.computation, "" if found.computation else model_id)
            beyond = found.alone_bytes - self._reported[model_id]
            exposed[key] = max(beyond, exposed.get(key, 0))
        return sum(exposed.values())

    def _loaded(self) -> Iterator[tuple[str, Holding]]:
        """Yield the loaded models, and drop the sizes of others."""
        for model_id in list(self._reported):
            try:
                yield model_id, self._holding(model_id)
            except ModelNotFound:
                del self._reported[model_id]
