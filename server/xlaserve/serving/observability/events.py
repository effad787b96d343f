"""The event log: recent changes of the server with their callers, in bounded memory."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

MAX_NAME = 256
"""Maximum length of model and caller names, in characters."""
MAX_TEXT = 1024
"""Maximum length of texts, in characters."""


class EventKind(StrEnum):
    """Kinds of events."""

    LOAD = "load"
    RELOAD = "reload"
    """A load of a version that is already serving."""
    UNLOAD = "unload"
    EVICTION = "eviction"
    """An unload to free memory for another model's load."""
    READ_AGAIN = "read again"
    """Rereading of the server's files, such as access rules, certificates or logs; see
    `subject`.
    """
    WORKER_STARTED = "worker started"
    WORKER_DIED = "worker died"


class Cause(StrEnum):
    """Why a change was made."""

    NONE = ""
    """A client requested the change."""
    START = "start"
    """Loading at server start."""
    REPOSITORY = "repository"
    """The files in the model repository changed."""
    FILES = "files"
    """The server's own files changed, or SIGHUP asked to reread them."""
    OTHER_WORKER = "other worker"
    """A client requested the change from another worker, and this worker follows."""


class Asker(msgspec.Struct, frozen=True, omit_defaults=True):
    """The client that requested a change; all empty for the server itself."""

    principal: str = ""
    """The client's name in the access rules."""
    peer: str = ""
    """The client's address."""
    protocol: str = ""
    """gRPC, gRPC-Web, REST, ModelMesh or SageMaker."""

    def seen_by(self, owner: str) -> "Asker":
        """Return the caller if it is `owner`, otherwise NOBODY."""
        return self if self.principal == owner else NOBODY


NOBODY = Asker()


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """Time, caller and cause of a load."""

    at_ns: int
    """Nanoseconds since the epoch."""
    asker: Asker = NOBODY
    cause: Cause = Cause.NONE


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of the server, successful or failed."""

    kind: EventKind
    at_ns: int
    """Nanoseconds since the epoch."""
    number: int = 0
    """Sequence number in the log, from 1, without gaps."""
    model: str = ""
    version: str = ""
    subject: str = ""
    """The file, worker or rule affected, if it is not a model."""
    failed: bool = False
    text: str = ""
    """Reason of the failure or of the change."""
    for_model: str = ""
    """The model whose load required the eviction."""
    asker: Asker = NOBODY
    cause: Cause = Cause.NONE
    worker: int | None = None
    """Number of the process; None for a single process or the parent."""


class Events(Protocol):
    """The server's event log, in this process or in the parent."""

    def note(self, event: Event) -> None:
        """Store an event, and assign its number."""

    async def read(self) -> "Kept":
        """Return the stored events."""
        ...


class Kept(msgspec.Struct, frozen=True):
    """Snapshot of the event log."""

    began_ns: int
    """Creation time of the log in nanoseconds since the epoch; each log numbers its events anew."""
    events: Sequence[Event]
    """Oldest first."""
    dropped: int
    """Number of old events dropped."""


class EventLog:
    """Stores the most recent events, up to a total JSON size. Belongs to the event loop."""

    def __init__(self, max_bytes: int, *, now: Callable[[], int] = time.time_ns) -> None:
        """`max_bytes` of 0 stores nothing; `now` returns nanoseconds since the epoch."""
        self._max_bytes = max_bytes
        self._began_ns = now()
        self._kept: deque[tuple[Event, int]] = deque()
        self._bytes = 0
        self._number = 0
        self._dropped = 0

    @property
    def size_bytes(self) -> int:
        """Return the JSON size of the stored events."""
        return self._bytes

    def note(self, event: Event) -> None:
        """Store an event, and drop the oldest ones beyond the limit."""
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
        """Return the stored events."""
        return self.kept()

    def kept(self) -> Kept:
        """Return the stored events."""
        return Kept(self._began_ns, tuple(event for event, _ in self._kept), self._dropped)


def chosen(
    events: Iterable[Event], *, search: str = "", failed: bool = False, model: str = ""
) -> list[Event]:
    """Filter events by text in any field (case-insensitive), failure, and model."""
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
    texts = (event.kind, event.model, event.subject, event.text, event.for_model, event.cause)
    return (*texts, asker.principal, asker.peer, asker.protocol)


def cut(text: str, most: int) -> str:
    """Truncate a text, and replace invalid characters."""
    kept = text if len(text) <= most else f"{text[:most]}…"
    return kept.encode(errors="replace").decode()
