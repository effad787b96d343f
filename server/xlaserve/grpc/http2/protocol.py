"""The asyncio protocol of a connection: moves bytes between transport and core."""

import asyncio
import time
from typing import Protocol, cast

from xlaserve.grpc.http2.busy_poll import BusyPoll
from xlaserve.grpc.http2.connection import RECEIVE_BYTES, ReceiveBuffer, ServerConnection
from xlaserve.grpc.http2.frames import ErrorCode
from xlaserve.net.stall import Stall

_WRITE_BUFFER_BYTES = 1 << 18
"""High watermark of the transport's write buffer."""
_WRITES_OF_A_TURN = 8
"""Maximum writes per turn: with a fast client, writing could otherwise go on without end."""
_LETTING_GO_SECONDS = 0.001
_LINGER_SECONDS = 1.0
"""Seconds for which an ended connection is still read, so that the client receives the GOAWAY."""


class Host(Protocol):
    """The server's interface for its connections."""

    def connect(self, protocol: "Http2Protocol", transport: asyncio.Transport) -> ServerConnection:
        """Create the protocol core of a new connection."""
        ...

    def admit(self, protocol: "Http2Protocol") -> bool:
        """Register a new connection, or return false if there are too many."""
        ...

    def disconnected(self, protocol: "Http2Protocol") -> None:
        """Unregister a closed connection."""
        ...


class Http2Protocol(asyncio.BufferedProtocol):
    """The asyncio protocol of one connection over TCP, a unix socket or TLS."""

    core: ServerConnection
    transport: asyncio.Transport

    def __init__(self, host: Host, buffer: ReceiveBuffer, poll: BusyPoll) -> None:
        self._host = host
        self._buffer = buffer
        self._poll = poll
        self._loop = asyncio.get_running_loop()
        self._flush_due = False
        self._closing = False
        self._unread = False
        """Whether the core has received bytes left to parse in the next turn."""
        self._greeting: asyncio.TimerHandle | None = None
        """Ends the connection if the client's preface does not arrive in time. A separate timer,
        because sweeps run at intervals and can be late if there are many connections."""
        self._stall = Stall()

    # --- interface for asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self.core = self._host.connect(self, transport)
        tls = transport.get_extra_info("ssl_object")
        is_h2 = tls is None or tls.selected_alpn_protocol() == "h2"
        if is_h2 and not self._host.admit(self):
            # Send no SETTINGS first: after SETTINGS, grpc-core considers the connection working
            # and reconnects without backoff, about 400 times a second.
            self.end(
                ErrorCode.ENHANCE_YOUR_CALM,
                "no more connections (max_connections, or the server is shutting down)",
            )
        else:
            self.core.start()
            if is_h2:
                self._greeting = self._loop.call_later(
                    self.core.preface_seconds, self._end_without_preface
                )
            else:
                self.end(ErrorCode.INADEQUATE_SECURITY, "TLS without ALPN h2")
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._closing:
            return self._buffer.view[:RECEIVE_BYTES]
        return self.core.receive_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._closing:
            return
        self._poll.arrived()
        if not self.core.received(nbytes) and not self._unread:
            # Let other connections run before parsing the rest.
            self._unread = True
            self.transport.pause_reading()
            self._loop.call_soon(self._proceed)
        if self._greeting is not None and self.core.greeted:
            self._greeting.cancel()
            self._greeting = None
        self.flush()
        if self.core.streams:
            # Flush after the calls just started, so that immediate responses are written together.
            self.wake()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.core.pause()

    def resume_writing(self) -> None:
        self.core.resume()
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        if self._greeting is not None:
            self._greeting.cancel()
        self.core.lost()
        self._let_go()
        self._host.disconnected(self)

    def _let_go(self) -> None:
        """Free unsent buffers in small steps: freeing hundreds of MB takes tens of ms."""
        unsent = self.core.unsent
        ends = time.perf_counter() + _LETTING_GO_SECONDS
        while unsent:
            if unsent[-1]:
                unsent[-1].pop()
            else:
                unsent.pop()
            if time.perf_counter() > ends:
                self._loop.call_soon(self._let_go)
                return

    # --- writing ---

    def flush(self) -> None:
        """Write pending output until the transport pauses writing or the turn ends."""
        self._flush_due = False
        core, transport = self.core, self.transport
        writes = 0
        try:
            while not self._closing and not transport.is_closing():
                if not (output := core.take_output()):
                    break
                transport.writelines(output)
                if core.blocked:
                    core.pump()
                if not core.streams:
                    self._poll.answered()
                writes += 1
                if writes == _WRITES_OF_A_TURN and core.output:
                    self.wake()  # let other connections run before writing the rest
                    return
        except BaseException:
            # Abort, as asyncio does after an error in `buffer_updated`, or the client would hang.
            transport.abort()
            raise
        leaves = core.leaves or core.control.client_leaves
        # A client that has not ended a request may not have read its response: grpc-core drops what
        # its application has not read when the connection ends before the stream.
        if core.failed is not None or (leaves and not core.streams and not core.awaits_ends):
            self._close()

    def wake(self) -> None:
        """Schedule a flush after the callbacks that are ready, so that responses are coalesced."""
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self.flush)

    def _proceed(self) -> None:
        if self._closing:
            return
        try:
            has_read = self.core.proceed()
        except BaseException:
            self.transport.abort()
            raise
        if has_read:
            self._unread = False
            self.transport.resume_reading()
        else:
            self._loop.call_soon(self._proceed)
        self.flush()

    # --- shutdown ---

    def go_away(self) -> None:
        """Start a graceful shutdown: GOAWAY, then close when all streams have ended."""
        self.core.go_away()
        self.flush()

    def leave(self) -> None:
        """Send the final GOAWAY without waiting for the client to acknowledge the first."""
        self.core.leave()
        self.flush()

    @property
    def leaves(self) -> bool:
        """Tell whether the final GOAWAY was sent."""
        return self.core.leaves

    def end(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Send a GOAWAY that names the last stream, and close."""
        self.core.end(code, reason)
        self.flush()

    def abort(self) -> None:
        """Close the connection immediately, discarding unsent bytes."""
        self.transport.abort()

    def _close(self) -> None:
        if self._closing or self.transport.is_closing():
            return
        self._closing = True
        self._let_go()
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        if self._unread:
            self.transport.resume_reading()
        try:
            # Closing with unread bytes would reset the connection, and the GOAWAY would be lost.
            self.transport.write_eof()
        except OSError:
            self.transport.close()  # the client has already closed
        else:
            self._loop.call_later(_LINGER_SECONDS, self.transport.abort)

    def _end_without_preface(self) -> None:
        self._greeting = None
        if not self.core.greeted and not self._closing:
            self.end(ErrorCode.SETTINGS_TIMEOUT, "no preface within the timeout")

    def sweep(self, *, message_ticks: int, answer_ticks: int) -> None:
        """Enforce time limits; the server calls this at regular intervals, which are ticks."""
        if self._looks_without_progress() > answer_ticks:
            # No GOAWAY: it would be queued after the bytes that the client does not read.
            self.abort()
            return
        if self._closing:
            return
        self.core.sweep(message_ticks, answer_ticks)
        self.flush()

    def _looks_without_progress(self) -> int:
        waits = self.transport.get_write_buffer_size()
        return self._stall.look(
            (waits, self.core.frames_sent), waits=bool(waits or self.core.is_held_back)
        )
