"""systemd as the service manager: readiness notifications, watchdog and socket activation.

Has no effect if systemd did not start the process (sd_notify(3), sd_listen_fds(3)).
"""

import asyncio
import os
import socket
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Protocol, Self

from xlaserve.errors import InvalidSettings
from xlaserve.process.predecessor import Predecessor

_FIRST_DESCRIPTOR = 3
_VARIABLES = (
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
)
_FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)


class ServiceManager(Protocol):
    """Receives state changes of the server: systemd, or the parent of a worker process."""

    def ready(self) -> None:
        """Report that the server is up, or that a reload has finished."""

    def reloads(self, begins: bool) -> None:
        """Report the start or the end of a reload."""

    def stopping(self) -> None:
        """Report that the server is draining."""

    async def keep_alive(self) -> None:
        """Send keep-alive messages until cancelled."""


class Systemd:
    """Sockets from systemd, and notifications to it."""

    def __init__(
        self,
        notify_socket: str = "",
        watchdog_seconds: float = 0.0,
        sockets: Mapping[str, Sequence[int]] | None = None,
        predecessor: Predecessor | None = None,
    ) -> None:
        """`sockets` are descriptors by their FileDescriptorName."""
        self.predecessor = predecessor
        """The server that this process replaces, if any."""
        self._notify_socket = notify_socket
        self._path = f"\0{notify_socket[1:]}" if notify_socket.startswith("@") else notify_socket
        self.watchdog_seconds = watchdog_seconds
        """Seconds without a keep-alive after which systemd restarts the service; 0 for never."""
        self._sockets = dict(sockets or {})
        self._is_up = False

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Self:
        """Read systemd's variables and remove them from the environment, so no child inherits them.

        Raises InvalidSettings if a variable is malformed.
        """
        found = {name: environment.pop(name, "") for name in _VARIABLES}
        ours = str(os.getpid())
        watchdog = 0.0
        if found["WATCHDOG_USEC"] and found["WATCHDOG_PID"] in ("", ours):
            watchdog = _number("WATCHDOG_USEC", found["WATCHDOG_USEC"]) / 1e6
        sockets: dict[str, list[int]] = {}
        if found["LISTEN_FDS"] and found["LISTEN_PID"] == ours:
            names = found["LISTEN_FDNAMES"].split(":")
            for number in range(_number("LISTEN_FDS", found["LISTEN_FDS"])):
                name = names[number] if number < len(names) else "unknown"
                os.set_inheritable(_FIRST_DESCRIPTOR + number, False)
                sockets.setdefault(name, []).append(_FIRST_DESCRIPTOR + number)
        predecessor = Predecessor.of(environment)
        return cls(found["NOTIFY_SOCKET"], watchdog, sockets, predecessor)

    def environment(self) -> dict[str, str]:
        """Return the environment variables that a replacement of this process needs."""
        microseconds = str(round(self.watchdog_seconds * 1e6))
        known = {"NOTIFY_SOCKET": self._notify_socket, "WATCHDOG_USEC": microseconds}
        return {name: value for name, value in known.items() if value not in ("", "0")}

    # --- sockets ---

    def take_socket(self, setting: str, name: str) -> socket.socket:
        """Return the listening socket of a name; the next call fails. Raises InvalidSettings.

        systemd keeps the socket open: connections made after this process ends wait for the next
        start.
        """
        descriptors = self._sockets.pop(name, [])
        if len(descriptors) != 1:
            given = ", ".join(sorted(self._sockets)) or "no other"
            expected = f"one socket of systemd with FileDescriptorName={name}"
            raise InvalidSettings(setting, expected, f"{len(descriptors)} (and {given})")
        taken = socket.socket(fileno=descriptors[0])
        listens = taken.type == socket.SOCK_STREAM and taken.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        )
        if taken.family not in _FAMILIES or not listens:
            taken.close()
            raise InvalidSettings(setting, "a ListenStream= socket", name)
        taken.setblocking(False)
        return taken

    # --- notifications ---

    def ready(self) -> None:
        """Report that the service is up or reloaded; a replacement takes over first."""
        self._is_up = True
        if self.predecessor is not None:
            self.predecessor.take_over()
        self._notify("READY=1")

    def reloading(self) -> None:
        """Report the start of a reload; `ready` reports its end."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._notify("RELOADING=1", f"MONOTONIC_USEC={now}")

    def stopping(self) -> None:
        """Report that the service is draining."""
        self._notify("STOPPING=1")

    def hand_over(self, pid: int) -> None:
        """Tell systemd that another process is now the main process; report nothing afterwards."""
        self._notify(f"MAINPID={pid}")
        self._path = ""

    def reloads(self, begins: bool) -> None:
        """Report the start or the end of a reload, except during startup."""
        if not self._is_up:
            return
        if begins:
            self.reloading()
        else:
            self.ready()

    async def keep_alive(self) -> None:
        """Send watchdog notifications, twice per watchdog interval, until cancelled.

        The event loop sends them: if it hangs, systemd restarts the service.
        """
        while self.watchdog_seconds:
            self._notify("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_seconds / 2)

    def _notify(self, *lines: str) -> None:
        if not self._path:
            return
        # Losing a notification is acceptable: never fail or block for it.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(lines).encode(), self._path)


def _number(variable: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise InvalidSettings(variable, "a number", text)
    return int(text)
