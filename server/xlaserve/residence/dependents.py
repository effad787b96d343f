"""Finds the models that are unloaded along with an ensemble or one of its steps."""

from xlaserve.residence.registry import Registry


class Dependents:
    """Implements `unload_dependents` (model repository extension, Unload)."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._brought: dict[str, set[str]] = {}
        """Ensemble -> models that were loaded because the ensemble needed them."""
        self._named: set[str] = set()
        """Models loaded by name (by a client, at startup or by a mesh): no ensemble's unload
        removes them."""

    def brought(self, ensemble: str, model: str) -> None:
        """Record that a model is being loaded because an ensemble needs it."""
        self._brought.setdefault(ensemble, set()).add(model)
        # The model is not loaded, so an earlier load by name no longer counts.
        self._named.discard(model)

    def named(self, model: str) -> None:
        """Record that a model was loaded by name, even if an ensemble needs it as well."""
        if self._registry.ready(model):
            self._named.add(model)

    def left(self, model: str) -> None:
        """Forget an unloaded model, and which models were loaded for it."""
        self._brought.pop(model, None)
        self._named.discard(model)

    def leaving_with(self, name: str) -> list[str]:
        """List in order: ensembles using the model, the model, models loaded only for these."""
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
