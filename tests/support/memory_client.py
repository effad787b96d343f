"""An in-memory HTTP/2 client connected to our server core, without sockets."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from support.frames import PREFACE, Error, Frame, Kind, literals, parse, settings
from xlaserve.grpc.http2.connection import ReceiveBuffer, ServerConnection
from xlaserve.grpc.http2.limits import Http2Limits, Shared
from xlaserve.grpc.http2.messages import PREFIX, Placement, StreamingReader
from xlaserve.grpc.http2.stream import ServerStream
from xlaserve.net.ledger import Ledger
from xlaserve.net.memory import MessageMemory

LINES = [(":method", "POST"), (":scheme", "http"), (":path", "/a")]
REQUEST = literals(LINES)
OK, STATUS = b"\x88", literals([("grpc-status", "0")])
MESSAGE = PREFIX.pack(0, 3) + b"abc"
_PLENTY = 1 << 40
_BUFFER = ReceiveBuffer()


def request(*more: tuple[str, str]) -> bytes:
    """Encode the header block of a request, with additional fields."""
    return literals([*LINES, *more])


class Streaming:
    """A streaming route; the test reads messages and sends answers itself."""

    message_first = False
    placement: Placement | None = None

    def __init__(self) -> None:
        self.streams: dict[int, ServerStream] = {}

    def begin(self, stream: ServerStream) -> None:
        """Store the stream and attach a reader."""
        self.streams[stream.id] = stream
        stream.reader = StreamingReader(1 << 20, lambda: None)


class Unary:
    """A unary route; the test sends the answers itself."""

    message_first = True
    placement: Placement | None = None

    def __init__(self) -> None:
        self.streams: dict[int, ServerStream] = {}
        self.messages: dict[int, bytes] = {}

    def begin(self, stream: ServerStream) -> None:
        """Store the stream and its message."""
        self.streams[stream.id] = stream
        if stream.message is not None:
            self.messages[stream.id] = bytes(stream.message)


class MemoryClient:
    """A client connection to a server core whose answers the test sends."""

    def __init__(
        self,
        route: Streaming | Unary | None = None,
        *,
        greets: bool = True,
        limit: int = _PLENTY,
        now: Callable[[], float] = lambda: 0.0,
        wake: Callable[[], None] = lambda: None,
        **limits: Any,
    ) -> None:
        self.route = route or Unary()
        self.ledger = Ledger(limit)
        shared = Shared(self.ledger, MessageMemory(0))
        self.limits = Http2Limits(**limits)
        self.core = ServerConnection(
            self.limits, lambda head: self.route, shared, wake=wake, buffer=_BUFFER, now=now
        )
        self.core.start()
        self.all: list[Frame] = []
        """All frames sent by the server."""
        if greets:
            self.send(PREFACE, settings())

    def send(self, *parts: bytes | Frame) -> list[Frame]:
        """Send frames, or arbitrary bytes; return the server's frames."""
        self.core.receive(b"".join(map(bytes, parts)))
        return self.taken()

    def send_in_pieces(self, octets: bytes, size: int = 1) -> list[Frame]:
        """Send bytes in pieces of equal size."""
        frames = []
        for start in range(0, len(octets), size):
            frames += self.send(octets[start : start + size])
        return frames

    def send_at_random(self, octets: bytes, random: Random) -> list[Frame]:
        """Send bytes in pieces of random sizes."""
        frames = []
        while octets:
            size = random.choice((1, 8, 9, 10, 100, 5000, 16_384, 1 << 17, 1 << 20))
            frames += self.send(octets[:size])
            octets = octets[size:]
        return frames

    def taken(self) -> list[Frame]:
        """Return the frames that the server has sent since the last call."""
        octets = b""
        while self.core.output:
            octets += b"".join(self.core.take_output())
            self.core.pump()
        frames, rest = parse(octets)
        assert not rest
        self.all += frames
        return frames

    @property
    def ended(self) -> list[str]:
        """The streams reset and GOAWAYs sent by the server, in order."""
        return told(self.all)

    @property
    def alive(self) -> bool:
        """Whether the connection is still open."""
        return self.core.failed is None


def told(frames: Sequence[Frame]) -> list[str]:
    """Describe the RST_STREAM and GOAWAY frames by stream and error code."""
    return [
        f"RST_STREAM {frame.stream} {_code(frame.payload)}"
        if frame.kind == Kind.RST_STREAM
        else f"GOAWAY {_code(frame.payload[4:8])}"
        for frame in frames
        if frame.kind in (Kind.RST_STREAM, Kind.GOAWAY)
    ]


def _code(octets: bytes) -> str:
    return Error(int.from_bytes(octets, "big")).name


def body_of(frames: Sequence[Frame], stream: int) -> bytes:
    """Return the concatenated DATA of a stream."""
    return b"".join(f.payload for f in frames if (f.kind, f.stream) == (Kind.DATA, stream))


def answer(stream: ServerStream, body: bytes = b"") -> bool:
    """Send a complete answer with one message."""
    message = PREFIX.pack(0, len(body)) + body
    return stream.answer(OK, [message], len(message), STATUS)
