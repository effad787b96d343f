"""The probe socket: liveness and readiness for local processes of the same user."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog

READY = b"ready\n"
LIVE = b"live\n"
"""First line of the answer if the server is not ready: during startup and drain."""
_MODE = 0o600
_BACKLOG = 16

_log = structlog.get_logger("probe")


@asynccontextmanager
async def probed(
    path: str, is_ready: Callable[[], bool], why: Callable[[], str] = str
) -> AsyncIterator[None]:
    """Context manager that answers each connection to a unix socket with READY or LIVE.

    After LIVE, the answer has the text from `why`: why the server is not ready.

    If the socket cannot be created, the server runs without it, and probes use its endpoints. An
    existing socket, such as that of the server that this one replaces, is replaced.
    """
    if not path:
        yield
        return
    try:
        listening, mark = _listening(path)
    except OSError as error:
        _log.warning(
            "probe socket not created",
            path=path,
            reason=error.strerror or str(error),
            to_do="set probe_socket to a path in a directory that this user can write to",
        )
        yield
        return

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(READY if is_ready() else LIVE + why().encode(errors="replace"))
        writer.close()

    server = await asyncio.start_unix_server(answer, sock=listening)
    try:
        yield
    finally:
        _unlink(path, mark)
        server.close()


def _listening(path: str) -> tuple[socket.socket, os.stat_result]:
    """Return a socket that listens at a path, and the status of its file; raise OSError."""
    # Bind to a temporary path and rename it, so that probes reach the previous server until then.
    own = Path(f"{path}.{os.getpid()}")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        own.unlink(missing_ok=True)
        listening.bind(str(own))
        own.chmod(_MODE)
        listening.listen(_BACKLOG)
        mark = own.lstat()
        own.rename(path)
    except BaseException:
        listening.close()
        with suppress(OSError):
            own.unlink(missing_ok=True)
        raise
    return listening, mark


def _unlink(path: str, mark: os.stat_result) -> None:
    """Remove the socket's file unless another server has replaced it."""
    with suppress(OSError):
        if os.path.samestat(mark, Path(path).lstat()):
            Path(path).unlink()
