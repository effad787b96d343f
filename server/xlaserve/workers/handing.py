"""Connection hand-off: the parent accepts connections for the least loaded workers.

If workers shared a port instead, the kernel would ignore their load and could give one worker all
of few connections. Connections queued in a worker's own socket would also be lost when that worker
dies.
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
"""Maximum number of connections accepted in one iteration of the event loop."""
_MOST_LAST_ACCEPTS = 1 << 16
"""Maximum number of connections accepted at shutdown, while clients may keep connecting."""
_RETRY_SECONDS = 0.02
"""Pause before accepting again if no worker takes connections or files are exhausted, in
seconds."""
_TRANSIENT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_log = structlog.get_logger("processes")


def handing_pair() -> tuple[socket.socket, socket.socket]:
    """Return a socket pair for handing over connections: the parent's end and the worker's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


class HandedConnections:
    """Replaces a listening socket in a worker: `accept` returns connections the parent accepted."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.received = 0
        """Number of connections received so far."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when a connection is available; -1 once closed."""
        return self._end.fileno()

    def setblocking(self, flag: bool) -> None:
        """Set whether `accept` blocks."""
        self._end.setblocking(flag)

    def accept(self) -> tuple[socket.socket, object]:
        """Return a connection and its peer's address, like a listening socket.

        Raises BlockingIOError if there is none, and EOFError once the parent is gone.
        """
        data, descriptors, _, _ = socket.recv_fds(self._end, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            if data:
                # This process is out of file descriptors, so the kernel closed the one received.
                raise ConnectionAbortedError
            raise EOFError
        self.received += 1
        connection = socket.socket(fileno=descriptors[0])
        try:
            return connection, connection.getpeername()
        except OSError:
            connection.close()
            raise ConnectionAbortedError from None  # the client has already disconnected

    async def next(self) -> socket.socket:
        """Return the next connection; raises EOFError once the parent is gone.

        Raises ConnectionAbortedError if a connection was lost: this process is out of files, or the
        client has disconnected.
        """
        while True:
            await readable(self)
            with suppress(BlockingIOError):
                return self.accept()[0]

    def close(self) -> None:
        """Accept no further connections."""
        self._end.close()


async def readable(end: "socket.socket | HandedConnections") -> None:
    """Wait until there is something to read, or the peer has closed."""
    loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
    descriptor = end.fileno()
    loop.add_reader(descriptor, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(descriptor)


class Taker(Protocol):
    """A worker that connections can be handed to."""

    @property
    def takes_connections(self) -> bool:
        """Whether connections may be handed to the worker."""
        ...

    @property
    def connections(self) -> int:
        """Number of the worker's connections, including those in transit."""
        ...

    def hand(self, setting: str, connection: socket.socket) -> bool:
        """Hand over a connection of an endpoint; returns False if that fails."""
        ...


class Handing:
    """Accepts an endpoint's connections, and hands each to the least loaded worker."""

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
        """Accepted connections that no worker has taken yet."""
        self._loop.add_reader(listening.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_OF_A_TURN):
            if not self._accept_one():
                return

    def hand_again(self, connection: socket.socket) -> None:
        """Hand a connection that one worker did not take to another; never blocks."""
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
        # Round-robin among workers with equally many connections.
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
        """Stop accepting; with `drain`, first hand over the connections in the accept queue."""
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
