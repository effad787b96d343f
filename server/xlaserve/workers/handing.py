"""Connection hand-off: the parent accepts each and gives it to the least loaded worker.

A kernel that shares a port chooses without a look at what workers have, so that of few connections
one may get all; and what waits in the queue of a worker's own socket is lost when the worker dies.
"""

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import structlog

from xlaserve.process.endpoints import Listening

_ACCEPTS_OF_A_TURN = 64
"""Most connections that are accepted before others have their turn."""
_MOST_LAST_ACCEPTS = 1 << 16
"""Most connections that are accepted at the end, while others may go on to connect."""
_RETRY_SECONDS = 0.02
"""Seconds without accepting where no worker takes a connection, or there are no more files."""
_TRANSIENT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_log = structlog.get_logger("processes")


def handing_pair() -> tuple[socket.socket, socket.socket]:
    """Return the parent's end and the worker's, on which connections are handed over."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


class HandedConnections:
    """Stands in a worker for a listening socket: `accept` returns what the parent accepted."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.received = 0
        """Connections that were handed over by now."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when a connection is there; -1 once closed."""
        return self._end.fileno()

    def setblocking(self, flag: bool) -> None:
        """Choose whether `accept` waits."""
        self._end.setblocking(flag)

    def accept(self) -> tuple[socket.socket, object]:
        """Return a connection and its peer's address, as a listening socket does.

        Raises BlockingIOError where none is there, and EOFError once the parent is gone.
        """
        data, descriptors, _, _ = socket.recv_fds(self._end, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            if data:
                raise ConnectionAbortedError  # the process has no more files: the kernel closed it
            raise EOFError
        self.received += 1
        connection = socket.socket(fileno=descriptors[0])
        try:
            return connection, connection.getpeername()
        except OSError:
            connection.close()
            raise ConnectionAbortedError from None  # the client has gone already

    async def next(self) -> socket.socket:
        """Return the next connection; raises EOFError once the parent is gone.

        Raises ConnectionAbortedError for one that is lost, as this process has no more files.
        """
        while True:
            await readable(self)
            with suppress(BlockingIOError):
                return self.accept()[0]

    def close(self) -> None:
        """Take no more."""
        self._end.close()


async def readable(end: "socket.socket | HandedConnections") -> None:
    """Return once there is something to read, or the other end is gone."""
    loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
    descriptor = end.fileno()
    loop.add_reader(descriptor, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(descriptor)


class Taker(Protocol):
    """A worker, as connections see it."""

    @property
    def takes_connections(self) -> bool:
        """Whether connections may be handed to it."""
        ...

    @property
    def connections(self) -> int:
        """Connections that it has, with those on their way to it."""
        ...

    def hand(self, setting: str, connection: socket.socket) -> bool:
        """Hand it a connection of an endpoint; false where it takes none now."""
        ...


class Handing:
    """Accepts the connections of one endpoint until stopped, and hands each to a worker."""

    def __init__(
        self, setting: str, listening: Listening, takers: Callable[[], Sequence[Taker]]
    ) -> None:
        self._setting = setting
        self._listening = listening
        self._takers = takers
        self._next = 0
        self._is_stopped = False
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._held: deque[socket.socket] = deque()
        """Connections that were accepted, and no worker has taken yet."""
        self._loop.add_reader(listening.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_OF_A_TURN):
            if not self._accept_one():
                return

    def hand_again(self, connection: socket.socket) -> None:
        """Hand a connection to another worker, which the first one has not taken; never waits."""
        if self._is_stopped:
            connection.close()
            return
        self._held.append(connection)
        if self._retry is None:
            self._accept()

    def _accept_one(self) -> bool:
        if self._held:
            connection = self._held.popleft()
        else:
            try:
                connection, _ = self._listening.accept()
            except ConnectionAbortedError:
                return True
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    raise
                _log.error("accepting paused", reason=str(error))
                return self._pause()
        if self._hand(connection):
            connection.close()
            return True
        self._held.appendleft(connection)
        return self._pause()

    def _hand(self, connection: socket.socket) -> bool:
        takers = [taker for taker in self._takers() if taker.takes_connections]
        if not takers:
            return False
        self._next += 1
        # Of those with equally many, each in its turn.
        start = self._next % len(takers)
        inorder = sorted([*takers[start:], *takers[:start]], key=lambda taker: taker.connections)
        return any(taker.hand(self._setting, connection) for taker in inorder)

    def _pause(self) -> bool:
        if self._retry is None:
            self._loop.remove_reader(self._listening.fileno())
            self._retry = self._loop.call_later(_RETRY_SECONDS, self._resume)
        return False

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listening.fileno(), self._accept)
        self._accept()

    def stop(self, *, drain: bool) -> None:
        """Accept no more; with `drain`, what waits in the accept queue is handed over first."""
        self._is_stopped = True
        if self._retry is None:
            self._loop.remove_reader(self._listening.fileno())
        else:
            self._retry.cancel()
        for _ in range(_MOST_LAST_ACCEPTS if drain or self._held else 0):
            if not self._accept_one() or not drain:
                break
        if self._retry is not None:
            self._retry.cancel()
        while self._held:
            self._held.popleft().close()
