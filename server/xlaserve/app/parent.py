"""The parent process's interface for its worker processes."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from xlaserve.app.listeners import Bound
from xlaserve.concurrency.control_plane import ChangeKind, ControlPlane, OneProcess
from xlaserve.concurrency.others import Others
from xlaserve.process.systemd import ServiceManager
from xlaserve.residence.log_settings import make_log_change
from xlaserve.serving.access.quotas import Admits
from xlaserve.serving.observability.event_notes import EventNotes
from xlaserve.serving.observability.events import EventLog, Events
from xlaserve.settings import Settings


class Parent(Protocol):
    """The process that started this worker."""

    @property
    def listeners(self) -> Bound:
        """Listeners for the connections that the parent hands over."""
        ...

    @property
    def manager(self) -> ServiceManager:
        """Receives the state of this process (ready, stopping), like systemd."""
        ...

    @property
    def others(self) -> Others:
        """The other processes of the server."""
        ...

    @property
    def quotas(self) -> Admits | None:
        """The callers' quotas, shared by all processes; None without access rules."""
        ...

    @property
    def events(self) -> Events:
        """The event log, which is in the parent process."""
        ...

    @property
    def worker(self) -> int:
        """Return the number of this worker."""
        ...

    @property
    def follow(self) -> Callable[[], Awaitable[None]] | None:
        """A function that waits until the registry mirrors the models in the engine process; None
        if this process loads models itself."""
        ...

    @property
    def plane(self) -> ControlPlane:
        """Applies changes in all processes of the server."""
        ...


def plane_of(parent: Parent | None) -> ControlPlane:
    """Return the control plane of this process, after registering the handler of log changes."""
    plane = OneProcess() if parent is None else parent.plane
    plane.handle(ChangeKind.LOG, make_log_change)
    return plane


def events_of(settings: Settings, parent: Parent | None) -> tuple[Events, EventNotes]:
    """Return the event log, and the object with which this process records events."""
    if parent is None:
        events = EventLog(settings.max_event_bytes)
        return events, EventNotes(events)
    return parent.events, EventNotes(parent.events, parent.worker)
