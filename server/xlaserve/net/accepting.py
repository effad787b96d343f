"""Accepts connections on a listening socket, including TLS handshakes."""

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from xlaserve.concurrency.completion import settle
from xlaserve.net.alerts import MOST_HELLO_BYTES, NO_APPLICATION_PROTOCOL, AlertingContext, alert_of
from xlaserve.net.tls import MakeContext
from xlaserve.process.endpoints import Listening

_ACCEPTS_OF_A_TURN = 64
"""Maximum connections accepted per loop iteration."""
_MOST_LAST_ACCEPTS = 1 << 16
"""Maximum connections accepted during shutdown, in case clients keep connecting."""
_RETRY_SECONDS = 1.0
"""Pause in seconds after `accept` failed for lack of file descriptors or memory."""
_CLOSED = -1
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_LEAST_SECONDS = 0.01
"""Minimum time for a handshake if the client's first bytes arrive just before the timeout."""
_SHUTDOWN_SECONDS = 2.0
"""Seconds a client has to answer TLS's close_notify before the connection is aborted."""
_LAST_WORD_SECONDS = 1.0
"""Seconds a client has to read the alert after a failed handshake."""
_MOST_LAST_BYTES = 1 << 18
"""Maximum bytes read and dropped from a client after a failed handshake."""
_SAID_SECONDS = 1.0
"""Minimum seconds between two log records of failed connections; those between are counted."""

_now = time.monotonic
_log = structlog.get_logger("accepting")


@dataclass(frozen=True, slots=True)
class Handshakes:
    """TLS parameters of a listener."""

    make_context: MakeContext
    seconds: float
    """Time limit of a handshake in seconds, from when the connection was accepted."""


class Acceptor:
    """Accepts connections on a socket until stopped, and creates a protocol for each.

    With TLS, the protocol is created after the handshake; until then the connection is counted in
    `in_handshake`. If `is_full` returns true, a new TLS connection is closed immediately, because
    no error can be sent before the handshake.
    """

    def __init__(
        self,
        listening: Listening,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        *,
        name: str = "",
        handshakes: Handshakes | None = None,
        is_full: Callable[[], bool] = lambda: False,
    ) -> None:
        """`name` is the setting of the endpoint, for log events."""
        listening.setblocking(False)
        self._listening = listening
        self._make_protocol = make_protocol
        self._name = name
        self._handshakes = handshakes
        self._is_full = is_full
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._beginning: set[asyncio.Task[None]] = set()
        self._unsaid = 0
        self._said_at = 0.0
        self._loop.add_reader(listening.fileno(), self._accept)

    @property
    def in_handshake(self) -> int:
        """Return the number of accepted connections that have no protocol yet."""
        return len(self._beginning)

    # --- accepting ---

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_OF_A_TURN):
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        """Accept one connection; false if none is pending or file descriptors are exhausted."""
        try:
            connection, address = self._listening.accept()
        except ConnectionAbortedError:
            return True  # the client has already disconnected
        except (BlockingIOError, InterruptedError):
            return False
        except EOFError:
            self._loop.remove_reader(self._listening.fileno())
            return False
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            _log.error("accepting paused", listener=self._name, reason=str(error))
            self._loop.remove_reader(self._listening.fileno())
            self._retry = self._loop.call_later(_RETRY_SECONDS, self._accept_again)
            return False
        connection.setblocking(False)
        if self._handshakes is not None and self._is_full():
            connection.close()
            self._say(address, "too many connections are open")
            return True
        task = self._loop.create_task(self._begin(connection, address))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)
        return True

    def _accept_again(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listening.fileno(), self._accept)

    # --- handshakes ---

    async def _begin(self, connection: socket.socket, address: object) -> None:
        shakes = self._handshakes
        try:
            if shakes is None:
                await self._loop.connect_accepted_socket(self._make_protocol, connection)
                return
            until = self._loop.time() + shakes.seconds
            await self._await_bytes(connection, until)
            await self._shake_hands(connection, shakes.make_context(), until)
        except (OSError, TimeoutError) as error:  # OSError includes SSLError
            self._say(address, str(error) or type(error).__name__)
            connection.close()
        except asyncio.CancelledError:
            connection.close()
        except BaseException:
            connection.close()
            raise

    async def _shake_hands(
        self, connection: socket.socket, context: ssl.SSLContext, until: float
    ) -> None:
        """Do the TLS handshake, then create the protocol; if it fails, send the client an alert."""
        if isinstance(context, AlertingContext):
            hello = connection.recv(MOST_HELLO_BYTES, socket.MSG_PEEK)
            if context.refuses(hello):
                with connection:
                    await self._last_word(connection, NO_APPLICATION_PROTOCOL, until)
                raise ConnectionAbortedError(
                    f"the client does not offer the protocol {context.agreed} (ALPN)"
                )
        # Event loops close the socket after a failed handshake without sending the alert, so keep
        # a duplicate to send it.
        with connection.dup() as spare:
            try:
                await self._loop.connect_accepted_socket(
                    self._make_protocol,
                    connection,
                    ssl=context,
                    ssl_handshake_timeout=max(_LEAST_SECONDS, until - self._loop.time()),
                    ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
                )
            except ssl.SSLError as error:
                await self._last_word(spare, alert_of(error), until)
                raise

    async def _last_word(self, connection: socket.socket, alert: bytes, until: float) -> None:
        """Send an alert, then read and drop data until the client closes or a timeout passes.

        Closing the socket with unread data would send a TCP reset, which can make the client lose
        the alert (RFC 1122 4.2.2.13).
        """
        until = min(until, self._loop.time() + _LAST_WORD_SECONDS)
        with suppress(OSError, TimeoutError):
            connection.setblocking(False)
            connection.send(alert)
            connection.shutdown(socket.SHUT_WR)
            async with asyncio.timeout_at(until):
                left = _MOST_LAST_BYTES
                while left > 0 and (read := await self._loop.sock_recv(connection, 1 << 14)):
                    left -= len(read)

    async def _await_bytes(self, connection: socket.socket, until: float) -> None:
        """Wait for the client's first bytes before starting a handshake, which takes 50 KB."""
        readable: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(connection.fileno(), settle, readable, None)
        try:
            async with asyncio.timeout_at(until):
                await readable
        except TimeoutError:
            raise TimeoutError("the client sent nothing") from None
        finally:
            self._loop.remove_reader(connection.fileno())

    def _say(self, address: object, reason: str) -> None:
        """Log a connection that failed before its protocol was created, at a limited rate."""
        now = _now()
        if now - self._said_at < _SAID_SECONDS:
            self._unsaid += 1
            return
        host = address[0] if isinstance(address, tuple) else "unix"
        _log.info(
            "connection not accepted",
            listener=self._name,
            peer=host,
            reason=reason,
            more_before=self._unsaid,
        )
        self._said_at, self._unsaid = now, 0

    # --- shutdown ---

    def stop(self) -> None:
        """Accept all pending connections, then close the listening socket; idempotent."""
        if self._listening.fileno() == _CLOSED:
            return
        if self._retry is not None:
            self._retry.cancel()
        else:
            self._loop.remove_reader(self._listening.fileno())
        for _ in range(_MOST_LAST_ACCEPTS):
            if not self._accept_one():
                break
        if self._retry is not None:
            self._retry.cancel()
        self._listening.close()

    async def begun(self) -> None:
        """Wait until every accepted connection has a protocol or has failed."""
        while self._beginning:
            await asyncio.wait(tuple(self._beginning))

    def abort(self) -> None:
        """Abort all handshakes."""
        for task in tuple(self._beginning):
            task.cancel()

    async def aborted(self) -> None:
        """Abort all handshakes, and wait for their tasks."""
        self.abort()
        with suppress(asyncio.CancelledError):
            await self.begun()
