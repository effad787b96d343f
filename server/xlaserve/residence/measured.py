"""Memory of loaded models that changes after their load."""

import asyncio
from contextlib import suppress

from xlaserve.residence.registry import Registry


class MeasuredMemory:
    """Updates reservations when models report a change."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Remember the event loop of the server, before any model is loaded."""
        self._loop = loop

    def changed(self, model: str) -> None:
        """Correct the reservations of a model; called in any thread."""
        with suppress(RuntimeError):  # the event loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._correct, model)

    def _correct(self, name: str) -> None:
        model = self._registry.find(name)
        for version in () if model is None else model.versions.values():
            if version.instance is not None:
                version.instance.correct()
