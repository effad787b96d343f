"""Loads and unloads that the code of Python models asks for."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

from xlaserve.concurrency.workers import Workers
from xlaserve.errors.code import ChangesItself
from xlaserve.residence.control import ModelControl
from xlaserve.residence.lifecycle import State
from xlaserve.residence.registry import Registry
from xlaserve.runtime.calls import Change


class CodeChanges:
    """Does what code asks for, but for what would wait for itself. Of the event loop."""

    def __init__(self, control: ModelControl, registry: Registry, workers: Workers) -> None:
        self._control = control
        self._registry = registry
        self._workers = workers
        self._begun: set[Change] = set()
        """Running changes."""

    async def make(self, change: Change, waiting: Collection[str]) -> None:
        """Load or unload a model, as `ModelControl` does for clients.

        `waiting` are the models whose requests wait for it. Raises ChangesItself where one of them,
        or a load that waits for it, would have to end first.
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
        """Return the models that a model has changed, or waits to, and so on from these."""
        found, left = set[str](), [model]
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += [change.model for change in self._begun if change.by == name]
        return found

    def _thread_for(self, model: str) -> AbstractContextManager[None]:
        """Return what gives another load a thread while a load of a model waits for it."""
        known = self._registry.find(model)
        states = [] if known is None else [one.state for one in known.versions.values()]
        if State.LOADING in states or State.RELOADING in states:
            return self._workers.lending_load()
        return nullcontext()
