"""An h2 server that behaves like our core, without any I/O."""

from collections.abc import Iterable, Iterator
from typing import Any

import h2.events
from h2.config import H2Configuration
from h2.connection import ConnectionState, H2Connection
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from h2.stream import StreamState

from support.frames import HEAD_BYTES, LARGEST_FRAME, PREFACE, literals

MAX_STREAMS = 3
MAX_HEADER_BYTES = 1024
HARD_HEADER_BYTES = 4096
"""Header list size at which the connection ends."""
STREAM_WINDOW = 65_535
CONNECTION_WINDOW = 70_000
MAX_MESSAGE_BYTES = 100_000

HEAD = [(":status", "200"), ("content-type", "application/grpc")]
TRAILERS = [("grpc-status", "0")]
_PREFIX_BYTES = 5


def refusal(problem: str) -> list[tuple[str, str]]:
    """Return the response headers that report an invalid message."""
    return [*HEAD, ("grpc-status", "13"), ("grpc-message", problem)]


def answer_to(path: str) -> bytes:
    """Return the body for a path whose last part is the body's size."""
    size = path.rpartition("/")[2]
    return b"." * int(size) if size.isascii() and size.isdigit() and len(size) < 6 else b"?"


class _Literals:
    """Encodes header blocks as our core does, so that output can be compared byte by byte.

    It does not use the dynamic table, and signals this once the client has asked for a smaller
    one (RFC 9113 4.3.1).
    """

    def __init__(self) -> None:
        self._has_table = True
        self._smallest = 4096

    @property
    def header_table_size(self) -> int:
        """Table size requested by the client; set by h2."""
        return self._smallest

    @header_table_size.setter
    def header_table_size(self, size: int) -> None:
        self._smallest = min(self._smallest, size)

    def encode(self, headers: Iterable[Any], huffman: bool = True) -> bytes:
        update = b""
        if self._has_table and self._smallest < 4096:
            self._has_table, update = False, b"\x20"
        return update + literals(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in headers
        )


class _Request:
    """The received part of a request's only message."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.received = bytearray()
        self.answered = False
        self.unsent = b""
        """DATA that waits for flow control; trailers follow it."""

    def missing(self) -> int:
        """Return the number of missing message bytes, as far as is known."""
        if len(self.received) < _PREFIX_BYTES:
            return 0
        return max(0, self._declared() + _PREFIX_BYTES - len(self.received))

    def problem(self, *, ended: bool) -> str | None:
        """Return the name our core has for what is wrong with the message, or None."""
        have = len(self.received)
        if have >= _PREFIX_BYTES:
            if self.received[0] > 1:
                return "FLAG"
            if self._declared() > MAX_MESSAGE_BYTES:
                return "TOO_LARGE"
            if have > self._declared() + _PREFIX_BYTES:
                return "SECOND"
        if ended and (have < _PREFIX_BYTES or self.missing()):
            return "TRUNCATED" if have else "NONE"
        return None

    def _declared(self) -> int:
        return int.from_bytes(self.received[1:_PREFIX_BYTES], "big")


class Reference:
    """h2, plus everything that h2 leaves to its user, done as our core does it."""

    def __init__(self) -> None:
        self.dead = False
        self._h2 = h2_connection()
        self._buffer = bytearray()
        self._greeted = 0
        self._requests: dict[int, _Request] = {}
        self._window = CONNECTION_WINDOW
        self._stream_windows: dict[int, int] = {}
        self._h2.data_to_send()

    def receive(self, data: bytes) -> bytes:
        """Process bytes and return the output."""
        self._buffer += data
        for frame in self._frames():
            try:
                events = self._h2.receive_data(frame)
            except ProtocolError:
                self.dead = True
                break
            for event in events:
                self._handle(event)
            self._pump()
        return self._h2.data_to_send()

    def states(self) -> dict[int, str]:
        """Return the states of the streams that are not closed."""
        return {
            number: stream.state_machine.state.name
            for number, stream in self._h2.streams.items()
            if stream.state_machine.state not in (StreamState.CLOSED, StreamState.IDLE)
        }

    def _frames(self) -> Iterator[bytes]:
        """Split the input: h2 drops the events of frames that precede an invalid one."""
        if self._greeted < len(PREFACE):
            yield self._take(min(len(PREFACE) - self._greeted, len(self._buffer)))
        while len(self._buffer) >= HEAD_BYTES and not self.dead:
            length = int.from_bytes(self._buffer[:3], "big")
            if length > LARGEST_FRAME:
                # Our core rejects a frame as soon as its length is known; h2 only when it is
                # complete.
                head = (LARGEST_FRAME + 1).to_bytes(3, "big") + self._buffer[3:HEAD_BYTES]
                yield head + bytes(LARGEST_FRAME + 1)
                return
            if len(self._buffer) < HEAD_BYTES + length:
                return
            yield self._take(HEAD_BYTES + length)

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        if self._greeted < len(PREFACE):
            self._greeted += count
        return taken

    def _handle(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived():
                found = dict(event.headers)
                self._requests[event.stream_id] = _Request(found[b":path"].decode("latin-1"))
                self._stream_windows[event.stream_id] = STREAM_WINDOW
            case h2.events.DataReceived():
                self._data(event.stream_id, event.data, event.flow_controlled_length)
            case h2.events.StreamEnded():
                self._message(event.stream_id, ended=True)
            case h2.events.StreamReset():
                self._requests.pop(event.stream_id, None)
            case h2.events.ConnectionTerminated():
                # For h2, GOAWAY ends the connection, but requests in flight are still served (6.8).
                self._h2.state_machine.state = ConnectionState.SERVER_OPEN

    def _data(self, stream: int, data: bytes, size: int) -> None:
        self._window -= size
        if self._window < CONNECTION_WINDOW >> 1:
            self._h2.increment_flow_control_window(CONNECTION_WINDOW - self._window)
            self._window = CONNECTION_WINDOW
        request = self._requests.get(stream)
        if request is None:
            return
        request.received += data
        self._stream_windows[stream] -= size
        self._message(stream, ended=False)

    def _message(self, stream: int, *, ended: bool) -> None:
        request = self._requests.get(stream)
        if request is None or request.answered:
            return
        problem = request.problem(ended=ended)
        if problem is not None:
            request.answered = True
            self._h2.send_headers(stream, refusal(problem), end_stream=True)
            self._close(stream)
        elif ended:
            request.answered = True
            request.unsent = answer_to(request.path)
            self._h2.send_headers(stream, HEAD)

    def _pump(self) -> None:
        for stream, request in tuple(self._requests.items()):
            if not request.answered:
                continue
            while request.unsent:
                window = self._h2.local_flow_control_window(stream)
                size = min(window, self._h2.max_outbound_frame_size, len(request.unsent))
                if size <= 0:
                    break
                self._h2.send_data(stream, request.unsent[:size])
                request.unsent = request.unsent[size:]
            else:
                self._h2.send_headers(stream, TRAILERS, end_stream=True)
                self._close(stream)

    def _close(self, stream: int) -> None:
        """Ask the client to stop sending if it has not ended its stream (RFC 9113, 8.1)."""
        del self._requests[stream]
        if not self._h2.streams[stream].closed:
            self._h2.reset_stream(stream)


def h2_connection() -> H2Connection:
    """Return an h2 connection with the limits used in the comparison, in force from the start."""
    connection = H2Connection(
        H2Configuration(
            client_side=False,
            header_encoding=None,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
    )
    connection.local_settings = Settings(
        client=False,
        initial_values={
            SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
            SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            SettingCodes.MAX_FRAME_SIZE: LARGEST_FRAME,
            SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
        },
    )
    connection.decoder.max_header_list_size = HARD_HEADER_BYTES
    connection.encoder = _Literals()  # type: ignore[assignment]
    connection.initiate_connection()
    connection.increment_flow_control_window(CONNECTION_WINDOW - 65_535)
    return connection
