"""Loads and unloads of models, requested by the code of Python models."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

from xlaserve.concurrency.workers import Workers
from xlaserve.errors.code import ChangesItself
from xlaserve.residence.control import ModelControl
from xlaserve.residence.lifecycle import State
from xlaserve.residence.registry import Registry
from xlaserve.runtime.calls import Change


class CodeChanges:
    """Executes loads and unloads that models request, and refuses changes that would deadlock.

    Used on the event loop only.
    """

    def __init__(self, control: ModelControl, registry: Registry, workers: Workers) -> None:
        self._control = control
        self._registry = registry
        self._workers = workers
        self._begun: set[Change] = set()
        """Loads and unloads in progress."""

    async def make(self, change: Change, waiting: Collection[str]) -> None:
        """Load or unload a model, as `ModelControl` does for clients.

        `waiting` are the models whose requests wait for this change. Raises ChangesItself if the
        change could only finish after one of them, or after a load that itself waits for the
        change.
        """
        self._control.require_explicit("load" if change.is_load else "unload")
        if change.model in waiting or change.by in self._waited_for(change.model):
            raise ChangesItself(change.by, change.model, is_load=change.is_load)
        self._begun.add(change)
        try:
            with self._thread_for(change.by):
                if change.is_load:
                    await self._control.load(change.model, change.parameters)
                else:
                    await self._control.unload(change.model, change.parameters)
        finally:
            self._begun.discard(change)

    def _waited_for(self, model: str) -> set[str]:
        """Return the model and, transitively, all models that it is loading or unloading."""
        found, left = set[str](), [model]
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += [change.model for change in self._begun if change.by == name]
        return found

    def _thread_for(self, model: str) -> AbstractContextManager[None]:
        """While the model is loading, allow one more concurrent load: its own load waits."""
        known = self._registry.find(model)
        states = [] if known is None else [one.state for one in known.versions.values()]
        if State.LOADING in states or State.RELOADING in states:
            return self._workers.lending_load()
        return nullcontext()
