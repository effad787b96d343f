"""The probe socket: liveness and readiness, for this machine and user alone."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog

READY = b"ready\n"
LIVE = b"live\n"
"""The begin of the answer before the server is ready, and while it drains."""
_MODE = 0o600
_BACKLOG = 16

_log = structlog.get_logger("probe")


@asynccontextmanager
async def probed(
    path: str, is_ready: Callable[[], bool], why: Callable[[], str] = str
) -> AsyncIterator[None]:
    """Answer each connection to a unix socket with READY or LIVE for the length of a block.

    Behind LIVE comes what `why` says: why the server is not ready.

    A server whose socket cannot be made serves nevertheless: then probes ask its endpoints. The
    socket takes the place of one that is there, as of the server that this one replaces.
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
    """Return a socket that listens at a path, and the state of its file; raises OSError."""
    # A path of this process until it listens: meanwhile probes reach the previous server.
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
