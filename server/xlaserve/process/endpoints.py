"""Endpoints that transports listen on: a TCP port or a unix socket."""

import errno
import os
import socket
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import structlog

from xlaserve.errors import InvalidSettings

_PORT, _UNIX, _SYSTEMD = "port:", "unix:", "systemd:"
NO_ENDPOINT = "none"
"""Setting of an endpoint that is disabled."""
MAX_UNIX_PATH_BYTES = 107
"""Capacity of sun_path on Linux, excluding the terminating zero byte."""
_LONGEST_BACKLOG = Path("/proc/sys/net/core/somaxconn")
"""File with Linux's upper limit on listen backlogs."""

_log = structlog.get_logger("endpoints")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`port:<n>`, `unix:<path>` or `systemd:<name>`; exactly one of the three is set."""

    port: int | None = None
    path: Path | None = None
    name: str = ""
    """FileDescriptorName of a socket passed by systemd."""

    @classmethod
    def parse(cls, setting: str, text: str) -> Self | None:
        """Parse an endpoint; None for `none`. Raises InvalidSettings with the setting's name."""
        if text == NO_ENDPOINT:
            return None
        if text.startswith(_PORT):
            digits = text.removeprefix(_PORT)
            if digits.isascii() and digits.isdigit() and int(digits) <= 65535:
                return cls(port=int(digits))
        elif text.startswith(_UNIX):
            path = text.removeprefix(_UNIX)
            if path and len(os.fsencode(path)) <= MAX_UNIX_PATH_BYTES:
                return cls(path=Path(path))
        elif text.startswith(_SYSTEMD) and text != _SYSTEMD:
            return cls(name=text.removeprefix(_SYSTEMD))
        expected = "port:<0 to 65535>, unix:<path> or systemd:<name>"
        number = text.rpartition(":")[2]
        if number.isascii() and number.isdigit() and not text.startswith(_PORT):
            expected += f" (did you mean port:{number}?)"
        raise InvalidSettings(setting, expected, text)


def check_grpc_endpoints(
    endpoints: Mapping[str, Endpoint | None], *, required: bool = True
) -> None:
    """Raise InvalidSettings for endpoints that ModelMesh could not reach.

    All unix sockets must be in one directory, which is mounted into all containers (ModelMesh,
    ServingRuntime).
    """
    for setting, endpoint in endpoints.items():
        if endpoint is None and required:
            raise InvalidSettings(setting, "port:<n> or unix:<path>", NO_ENDPOINT)
    folders = {e.path.parent for e in endpoints.values() if e is not None and e.path is not None}
    if len(folders) > 1:
        shown = ", ".join(sorted(map(str, folders)))
        raise InvalidSettings("grpc_data_endpoint", "a socket in the same directory", shown)


class Listening(Protocol):
    """A source of connections: a listening socket or an object with the same methods."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when a connection waits; -1 once closed."""
        ...

    def setblocking(self, flag: bool, /) -> None:
        """Choose whether `accept` blocks."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Return a connection and its peer's address.

        Raises the exceptions of a listening socket, and EOFError if no more connections will
        arrive.
        """
        ...

    def close(self) -> None:
        """Stop accepting connections."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A bound, listening socket, and the address for clients."""

    socket: Listening
    address: str
    setting: str = ""
    """Name of the setting that configures the endpoint."""
    file: os.stat_result | None = None
    """Status of the unix socket's file, if this process created it."""
    owns_file: Callable[[], bool] = lambda: True
    """Tells whether this process removes the file on close: another one may use it."""

    def close(self) -> None:
        """Close the socket, and remove its unix socket file unless another server has replaced it.

        A draining server closes its listeners, so that the next server can use the path.
        """
        self.socket.close()
        if self.file is None or not self.owns_file():
            return
        path = Path(self.address.removeprefix(_UNIX))
        with suppress(OSError):
            if _identity(path.lstat()) == _identity(self.file):
                path.unlink()


def listen(
    setting: str, endpoint: Endpoint, *, host: str, unix_socket_mode: int, backlog: int
) -> Listener:
    """Bind and listen. Raises InvalidSettings if the address is not available.

    `backlog` is the maximum number of connections waiting to be accepted. Pass it to asyncio as
    well, because asyncio calls `listen` again with its own default.

    A stale unix socket is replaced. Any other existing file is an error, and is not touched.
    """
    try:
        if endpoint.path is not None:
            return _listen_unix(setting, endpoint.path, unix_socket_mode, backlog)
        return _listen_tcp(setting, host, endpoint.port or 0, backlog)
    except OSError as error:
        where = f"unix:{endpoint.path}" if endpoint.path else f"{host}, port {endpoint.port}"
        expected = f"an address to listen on ({error.strerror or error})"
        if error.errno == errno.EADDRINUSE and endpoint.path is None:
            where = f"{host}:{endpoint.port}, which is in use"
            flag = f"--{setting.replace('_', '-')}"
            expected = f"a free port: stop what listens there, or use {flag} port:0"
        raise InvalidSettings(setting, expected, where) from error


def _identity(file: os.stat_result) -> tuple[int, int, int]:
    # The inode number alone is not enough: it is reused as soon as it is free.
    return file.st_dev, file.st_ino, file.st_mtime_ns


def adopt(setting: str, given: socket.socket) -> Listener:
    """Return a listener for an inherited socket, which stays open."""
    name = given.getsockname()
    if given.family == socket.AF_UNIX:
        return Listener(given, f"{_UNIX}{os.fsdecode(name)}", setting)
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return Listener(given, f"{host}:{name[1]}", setting)


def check_backlog(backlog: int) -> None:
    """Log a warning if the system reduces the backlog."""
    try:
        longest = int(_LONGEST_BACKLOG.read_text())
    except (OSError, ValueError):
        return
    if longest < backlog:
        _log.warning(
            "listen_backlog reduced by the system", to=longest, sysctl="net.core.somaxconn"
        )


def _listen_tcp(setting: str, host: str, port: int, backlog: int) -> Listener:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(backlog)
    except OSError:
        listening.close()
        raise
    listening.setblocking(False)
    shown = f"[{host}]" if ":" in host else host
    return Listener(listening, f"{shown}:{listening.getsockname()[1]}", setting)


def _listen_unix(setting: str, path: Path, mode: int, backlog: int) -> Listener:
    _remove_stale(setting, path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(path))
        path.chmod(mode)
        file = path.lstat()
        listening.listen(backlog)
    except OSError:
        listening.close()
        raise
    listening.setblocking(False)
    return Listener(listening, f"unix:{path}", setting, file)


def _remove_stale(setting: str, path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise InvalidSettings(setting, "a path that does not exist", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # Non-blocking, since connecting blocks while the accept queue is full. Only ECONNREFUSED
        # proves that nobody listens; a socket without permission or of another type fails
        # differently.
        probe.setblocking(False)
        if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
            raise InvalidSettings(setting, "a socket not in use by another process", str(path))
    path.unlink()
