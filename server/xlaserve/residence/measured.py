"""Corrects reservations when the memory of a loaded model changes."""

import asyncio
from contextlib import suppress

from xlaserve.residence.registry import Registry


class MeasuredMemory:
    """Corrects reservations when models report a change of their memory."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the server's event loop, before any model is loaded."""
        self._loop = loop

    def changed(self, model: str) -> None:
        """Schedule a correction of a model's reservations; called in any thread."""
        with suppress(RuntimeError):  # the event loop may be closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._correct, model)

    def _correct(self, name: str) -> None:
        model = self._registry.find(name)
        for version in () if model is None else model.versions.values():
            if version.instance is not None:
                version.instance.correct()
