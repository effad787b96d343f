"""The parent process, as a worker sees it."""

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
    """The process that started this one as a worker."""

    @property
    def listeners(self) -> Bound:
        """The endpoints, whose connections it hands over."""
        ...

    @property
    def manager(self) -> ServiceManager:
        """Hears how this process goes, in the place of systemd."""
        ...

    @property
    def others(self) -> Others:
        """Processes started by the parent."""
        ...

    @property
    def quotas(self) -> Admits | None:
        """The quotas of callers of all processes; None without rules of access."""
        ...

    @property
    def events(self) -> Events:
        """The event log, which the parent keeps."""
        ...

    @property
    def worker(self) -> int:
        """Return this process's number among the workers."""
        ...

    @property
    def follow(self) -> Callable[[], Awaitable[None]] | None:
        """Returns once the registry shows what the engine has loaded; None where models are loaded
        in this process."""
        ...

    @property
    def plane(self) -> ControlPlane:
        """Has changes made in every process of the server."""
        ...


def plane_of(parent: Parent | None) -> ControlPlane:
    """Return the control plane of the process, through which log levels change too."""
    plane = OneProcess() if parent is None else parent.plane
    plane.handle(ChangeKind.LOG, make_log_change)
    return plane


def events_of(settings: Settings, parent: Parent | None) -> tuple[Events, EventNotes]:
    """Return the event log, and the recorder of this process's events."""
    if parent is None:
        events = EventLog(settings.max_event_bytes)
        return events, EventNotes(events)
    return parent.events, EventNotes(parent.events, parent.worker)
