"""The sizes that a mesh was told, beside what its models hold now."""

from collections.abc import Callable

from xlaserve.errors import ModelNotFound


class ToldSizes:
    """The size in bytes that a mesh was told of each loaded model.

    A mesh hears the size of a model once, when it is loaded, and takes it for free when it has
    evicted it. But what models share stays for the others: when the one leaves with which a mesh
    counts a program, its heirs hold more than they said. So what is held and was not told is told
    with the next load, and asked for before it, and the sum over all models that a mesh counts is
    never less than they hold, but for the loads in progress.
    """

    def __init__(self, held_bytes: Callable[[str], int]) -> None:
        """Count the models of which `held_bytes` says what they hold now; it raises ModelNotFound
        for one that is not loaded."""
        self._held_bytes = held_bytes
        self._told: dict[str, int] = {}

    def tell(self, model_id: str) -> int:
        """Return the size of a model that was loaded, at least 1, and keep it as told."""
        self._told.pop(model_id, None)
        told = max(1, self._held_bytes(model_id) + self.untold_bytes())
        self._told[model_id] = told
        return told

    def told(self, model_id: str) -> int:
        """Return the size of a loaded model, at least 1: as it was told, and what it holds besides
        that the mesh does not count yet, which is told with this."""
        held = max(1, self._held_bytes(model_id))
        told = self._told.get(model_id, held)
        if model_id in self._told:
            told += min(self.untold_bytes(), max(0, held - told))
            self._told[model_id] = told
        return told

    def of(self, model_id: str) -> int | None:
        """Return what was told of a model by now, and tell nothing more; None for none."""
        return self._told.get(model_id)

    def untold_bytes(self) -> int:
        """Return what all the models hold beyond what was told of them; 0 if that is not less."""
        held = 0
        for model_id in list(self._told):
            try:
                held += self._held_bytes(model_id)
            except ModelNotFound:
                del self._told[model_id]
        return max(0, held - sum(self._told.values()))
