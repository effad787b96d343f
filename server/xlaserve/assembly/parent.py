"""The parent of a server that is one of several processes."""

from typing import Protocol

from xlaserve.assembly.listeners import Bound
from xlaserve.core.control_plane import ChangeKind, ControlPlane, OneProcess
from xlaserve.core.log_settings import make_log_change
from xlaserve.core.others import Others
from xlaserve.systemd import ServiceManager


class Parent(Protocol):
    """The process that started this one as one of several that are one server."""

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
        """The other processes that it started."""
        ...

    @property
    def plane(self) -> ControlPlane:
        """Has changes made in every process of the server."""
        ...


def plane_of(parent: Parent | None) -> ControlPlane:
    """Return the control plane of the process, which the log is changed by."""
    plane = OneProcess() if parent is None else parent.plane
    plane.handle(ChangeKind.LOG, make_log_change)
    return plane
