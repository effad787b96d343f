"""The accept side of a listening socket: connections, and TLS handshakes before they are ones."""

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
"""Limit of connections accepted before other work."""
_MOST_LAST_ACCEPTS = 1 << 16
"""Limit of connections accepted at the end, while others keep connecting."""
_RETRY_SECONDS = 1.0
"""Pause in seconds after accept failed for lack of file descriptors or memory."""
_CLOSED = -1
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_LEAST_SECONDS = 0.01
"""Extra seconds for a handshake whose client spoke just before the timeout."""
_SHUTDOWN_SECONDS = 2.0
"""Seconds that a client has to answer the end of TLS, behind which its connection is cut off."""
_LAST_WORD_SECONDS = 1.0
"""Seconds that a client has to read why its handshake failed."""
_MOST_LAST_BYTES = 1 << 18
"""Bytes that are read, and dropped, of a client whose handshake has failed."""
_SAID_SECONDS = 1.0
"""Seconds between two records of handshakes that failed; the next one counts those between."""

_now = time.monotonic
_log = structlog.get_logger("accepting")


@dataclass(frozen=True, slots=True)
class Handshakes:
    """The TLS side of a listener's connections."""

    make_context: MakeContext
    seconds: float
    """Seconds a handshake may take, from the moment its connection was accepted."""


class Acceptor:
    """Accepts a socket's connections until stopped, and creates a protocol for each.

    Over TLS a protocol has its connection once the handshake has ended. Until then the connection
    counts in `in_handshake`; where `is_full` says so it is closed instead, since nothing could be
    said on it that its client would understand.
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
        """`name` is the setting of the endpoint, as the log shows it."""
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
        """Return the number of accepted connections without a protocol yet."""
        return len(self._beginning)

    # --- accepting ---

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_OF_A_TURN):
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        """Accept a connection; false if none waits, or files are exhausted."""
        try:
            connection, address = self._listening.accept()
        except ConnectionAbortedError:
            return True  # the client has gone already
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

    # --- connections before they have a protocol ---

    async def _begin(self, connection: socket.socket, address: object) -> None:
        shakes = self._handshakes
        try:
            if shakes is None:
                await self._loop.connect_accepted_socket(self._make_protocol, connection)
                return
            until = self._loop.time() + shakes.seconds
            await self._heard(connection, until)
            await self._shake_hands(connection, shakes.make_context(), until)
        except (OSError, TimeoutError) as error:  # an SSLError is an OSError
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
        """Do the TLS handshake, then create the protocol; a client is told why it failed."""
        if isinstance(context, AlertingContext):
            hello = connection.recv(MOST_HELLO_BYTES, socket.MSG_PEEK)
            if context.refuses(hello):
                with connection:
                    await self._last_word(connection, NO_APPLICATION_PROTOCOL, until)
                raise ConnectionAbortedError(
                    f"the client offers other protocols than {context.agreed} (ALPN)"
                )
        # Event loops close the connection where the handshake fails, with the alert unsent.
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

    async def _last_word(self, connection: socket.socket, said: bytes, until: float) -> None:
        """Send data, and return once the client has read it or its time is over.

        To close a connection before what the client has sent was read would take the last word from
        it, since it is reset then (RFC 1122, 4.2.2.13).
        """
        until = min(until, self._loop.time() + _LAST_WORD_SECONDS)
        with suppress(OSError, TimeoutError):
            connection.setblocking(False)
            connection.send(said)
            connection.shutdown(socket.SHUT_WR)
            async with asyncio.timeout_at(until):
                left = _MOST_LAST_BYTES
                while left > 0 and (read := await self._loop.sock_recv(connection, 1 << 14)):
                    left -= len(read)

    async def _heard(self, connection: socket.socket, until: float) -> None:
        """Wait until the client has sent something: a handshake holds 50 KB."""
        heard: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(connection.fileno(), settle, heard, None)
        try:
            async with asyncio.timeout_at(until):
                await heard
        except TimeoutError:
            raise TimeoutError("the client sent nothing") from None
        finally:
            self._loop.remove_reader(connection.fileno())

    def _say(self, address: object, reason: str) -> None:
        """Log a connection that came to nothing, and how many more did since the last record."""
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
        """Drain the accept queue, and refuse later connections; idempotent."""
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
        """Return once every accepted connection has its protocol or has failed."""
        while self._beginning:
            await asyncio.wait(tuple(self._beginning))

    def abort(self) -> None:
        """Abort connections still in their handshake."""
        for task in tuple(self._beginning):
            task.cancel()

    async def aborted(self) -> None:
        """Cut off pending handshakes, and wait for that."""
        self.abort()
        with suppress(asyncio.CancelledError):
            await self.begun()
