"""Logs who cancelled a load and what happens to its model next."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import structlog

from xlaserve.errors import LoadCancelled
from xlaserve.residence.registry import Registry
from xlaserve.serving.observability.event_notes import EventNotes, asker_now
from xlaserve.serving.observability.events import NOBODY, Asker

_ALL = ""


class Cancelled(NamedTuple):
    """Why a load was cancelled, in the words of the log."""

    by: str
    next: str
    """The next step for the model."""


LEFT = Cancelled(
    "its clients, none of which is waiting now",
    "the next load starts from the beginning",
)
STOPPING = Cancelled("the server's shutdown", "the next start loads the models of its settings")
_UNLOADED = "it stays unloaded until a client loads it"
_ANSWERS = "the previously loaded version continues to answer"

_log = structlog.get_logger("loading")


class Cancelling:
    """Logs each cancelled load with the caller that cancelled it."""

    def __init__(self, registry: Registry, notes: EventNotes) -> None:
        self._registry = registry
        self._notes = notes
        self._why: dict[str, Cancelled] = {}

    async def load(self, name: str, load: Callable[[], Awaitable[None]]) -> None:
        """Load a model; log the cause if the load is cancelled. Raises the exceptions of `load`."""
        asker = asker_now()
        try:
            await self._notes.load(name, load)
        except (asyncio.CancelledError, LoadCancelled):
            why = self._why.get(name) or self._why.get(_ALL) or LEFT
            serves = why is LEFT and self._registry.ready(name)
            _log.info(
                "model not loaded",
                model=name,
                version="",
                reason="the load was cancelled",
                asked_by=_named(asker),
                cancelled_by=why.by,
                consequence=_ANSWERS if serves else why.next,
            )
            raise

    def stop(self) -> None:
        """Attribute every later cancellation to the shutdown of the server."""
        self._why[_ALL] = STOPPING

    @contextmanager
    def unloading(self, name: str = _ALL) -> Iterator[None]:
        """Attribute cancelled loads of a model, or of all models, to an unload by this caller."""
        what = "an unload" if name else "an unload of every model"
        before = self._why.get(name)
        self._why[name] = Cancelled(f"{what} by {_named(asker_now())}", _UNLOADED)
        try:
            yield
        finally:
            if before is None:
                self._why.pop(name, None)
            else:
                self._why[name] = before


def _named(asker: Asker) -> str:
    """Return the caller's name for the log."""
    if asker == NOBODY:
        return "the server"
    principal = f"{asker.principal} at " if asker.principal else ""
    return f"{principal}{asker.peer or 'an unknown address'} ({asker.protocol})"
