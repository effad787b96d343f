"""The event log: changes of the server with their callers, in bounded memory."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

MAX_NAME = 256
"""Kept characters of the name of a model or a caller."""
MAX_TEXT = 1024
"""Kept characters of a text."""


class EventKind(StrEnum):
    """Kinds of events."""

    LOAD = "load"
    RELOAD = "reload"
    """A load of a version that answers already."""
    UNLOAD = "unload"
    EVICTION = "eviction"
    """An unload that a load needed the memory of."""
    READ_AGAIN = "read again"
    """Files of the server: access rules, certificates, logs. Their name is the subject."""
    WORKER_STARTED = "worker started"
    WORKER_DIED = "worker died"


class Cause(StrEnum):
    """Reasons for an event that no client asked for, or not this process."""

    NONE = ""
    """A client asked for it."""
    START = "start"
    """Part of the start."""
    REPOSITORY = "repository"
    """The files of the repository have changed."""
    FILES = "files"
    """Changed files of the server, or a request to read them again."""
    OTHER_WORKER = "other worker"
    """Another process of the server was asked for it, and this one follows."""


class Asker(msgspec.Struct, frozen=True, omit_defaults=True):
    """The caller of a change; empty for the server itself."""

    principal: str = ""
    """Its name in the access rules."""
    peer: str = ""
    """Its address."""
    protocol: str = ""
    """gRPC, gRPC-Web, REST, ModelMesh or SageMaker."""

    def seen_by(self, owner: str) -> "Asker":
        """Return it for itself, and nobody for other callers."""
        return self if self.principal == owner else NOBODY


NOBODY = Asker()


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """Time and caller of a load."""

    at_ns: int
    """Since the epoch."""
    asker: Asker = NOBODY
    cause: Cause = Cause.NONE


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change of the server, done or failed."""

    kind: EventKind
    at_ns: int
    """Since the epoch."""
    number: int = 0
    """Place in the log, from 1 on, without gaps."""
    model: str = ""
    version: str = ""
    subject: str = ""
    """The affected file, worker or rule, if it is no model."""
    failed: bool = False
    text: str = ""
    """Why it failed, or why it was done."""
    for_model: str = ""
    """The model whose load needed it."""
    asker: Asker = NOBODY
    cause: Cause = Cause.NONE
    worker: int | None = None
    """Its process; None for a single one, or the parent."""


class Events(Protocol):
    """The event log of the server, wherever it is kept."""

    def note(self, event: Event) -> None:
        """Keep an event, and number it."""

    async def read(self) -> "Kept":
        """Return the kept events."""
        ...


class Kept(msgspec.Struct, frozen=True):
    """The content of the log at one moment."""

    began_ns: int
    """Start of the log, since the epoch; numbers restart with it."""
    events: Sequence[Event]
    """The oldest first."""
    dropped: int
    """Events dropped for newer ones."""


class EventLog:
    """Keeps the last events, up to a size in JSON. Belongs to the event loop."""

    def __init__(self, max_bytes: int, *, now: Callable[[], int] = time.time_ns) -> None:
        """`now` is the time since the epoch; with 0 bytes none is kept."""
        self._max_bytes = max_bytes
        self._began_ns = now()
        self._kept: deque[tuple[Event, int]] = deque()
        self._bytes = 0
        self._number = 0
        self._dropped = 0

    @property
    def size_bytes(self) -> int:
        """Return the size of the kept events in JSON."""
        return self._bytes

    def note(self, event: Event) -> None:
        """Keep an event, and drop the oldest ones beyond the limit."""
        self._number += 1
        event = msgspec.structs.replace(event, number=self._number)
        size = len(msgspec.json.encode(event))
        self._kept.append((event, size))
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, left = self._kept.popleft()
            self._bytes -= left
            self._dropped += 1

    async def read(self) -> Kept:
        """Return the kept events."""
        return self.kept()

    def kept(self) -> Kept:
        """Return the kept events."""
        return Kept(self._began_ns, tuple(event for event, _ in self._kept), self._dropped)


def chosen(
    events: Iterable[Event], *, search: str = "", failed: bool = False, model: str = ""
) -> list[Event]:
    """Return the events that hold a text in any of their parts, in their order."""
    needle = search.casefold()
    return [
        event
        for event in events
        if (event.failed or not failed)
        and (not model or event.model == model)
        and (not needle or any(needle in part.casefold() for part in _parts(event)))
    ]


def _parts(event: Event) -> Sequence[str]:
    asker = event.asker
    said = (event.kind, event.model, event.subject, event.text, event.for_model, event.cause)
    return (*said, asker.principal, asker.peer, asker.protocol)


def cut(text: str, most: int) -> str:
    """Return a text cut to a number of characters, without invalid ones."""
    kept = text if len(text) <= most else f"{text[:most]}…"
    return kept.encode(errors="replace").decode()
