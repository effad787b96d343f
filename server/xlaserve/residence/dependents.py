"""Dependencies of ensembles on models, and unloading along them."""

from xlaserve.residence.registry import Registry


class Dependents:
    """Finds the models of `unload_dependents` (model repository extension, Unload)."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._brought: dict[str, set[str]] = {}
        """Ensemble -> models that were loaded for it."""
        self._named: set[str] = set()
        """Models that a client, the start or a mesh loaded by name: they stay."""

    def brought(self, ensemble: str, model: str) -> None:
        """Record a model that is loaded for an ensemble."""
        self._brought.setdefault(ensemble, set()).add(model)
        # It was evicted since somebody loaded it by name, or never loaded.
        self._named.discard(model)

    def named(self, model: str) -> None:
        """Note that a model was loaded by name, before, while or after an ensemble needed it."""
        if self._registry.ready(model):
            self._named.add(model)

    def left(self, model: str) -> None:
        """Forget the loaders of an unloaded model, and its own dependencies."""
        self._brought.pop(model, None)
        self._named.discard(model)

    def leaving_with(self, name: str) -> list[str]:
        """List the ensembles over a model, it, and models loaded for these only, in order."""
        leaving: dict[str, None] = {}

        def visit(model: str) -> None:
            for ensemble in self._ensembles_over(model):
                if ensemble not in leaving:
                    visit(ensemble)
            leaving[model] = None
            for step in self._brought.get(model, set()) - self._named:
                if step not in leaving and leaving.keys() >= set(self._ensembles_over(step)):
                    visit(step)

        visit(name)
        return list(leaving)

    def _ensembles_over(self, name: str) -> list[str]:
        return [
            model.name
            for model in self._registry.models()
            if any(
                version.instance is not None
                and name in (step for step, _ in version.instance.steps)
                for version in model.versions.values()
            )
        ]
