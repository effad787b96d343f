"""A client in memory: frames go to the engine, and what it answers comes back as frames."""

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
    """Write the header block of a request, with these headers besides."""
    return literals([*LINES, *more])


class Streaming:
    """A route that takes the messages of a request as they come, and answers when it is told."""

    message_first = False
    placement: Placement | None = None

    def __init__(self) -> None:
        self.streams: dict[int, ServerStream] = {}

    def begin(self, stream: ServerStream) -> None:
        """Keep the stream, and read what comes."""
        self.streams[stream.id] = stream
        stream.reader = StreamingReader(1 << 20, lambda: None)


class Unary:
    """A route that keeps its requests, and answers when it is told."""

    message_first = True
    placement: Placement | None = None

    def __init__(self) -> None:
        self.streams: dict[int, ServerStream] = {}
        self.messages: dict[int, bytes] = {}

    def begin(self, stream: ServerStream) -> None:
        """Keep the stream, and its message."""
        self.streams[stream.id] = stream
        if stream.message is not None:
            self.messages[stream.id] = bytes(stream.message)


class MemoryClient:
    """A connection, whose server is told by the test when to answer."""

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
        """Everything that the server has sent."""
        if greets:
            self.send(PREFACE, settings())

    def send(self, *parts: bytes | Frame) -> list[Frame]:
        """Send frames, or bytes that only look like some; return what is answered."""
        self.core.receive(b"".join(map(bytes, parts)))
        return self.taken()

    def send_in_pieces(self, octets: bytes, size: int = 1) -> list[Frame]:
        """Send bytes in reads of one size."""
        frames = []
        for start in range(0, len(octets), size):
            frames += self.send(octets[start : start + size])
        return frames

    def send_at_random(self, octets: bytes, random: Random) -> list[Frame]:
        """Send bytes in reads of any size."""
        frames = []
        while octets:
            size = random.choice((1, 8, 9, 10, 100, 5000, 16_384, 1 << 17, 1 << 20))
            frames += self.send(octets[:size])
            octets = octets[size:]
        return frames

    def taken(self) -> list[Frame]:
        """Return what the server has sent since."""
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
        """What the server has reset or ended, in its order."""
        return told(self.all)

    @property
    def alive(self) -> bool:
        """Whether the connection has not been ended."""
        return self.core.failed is None


def told(frames: Sequence[Frame]) -> list[str]:
    """Tell the RST_STREAM and GOAWAY among frames, with stream and code."""
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
    """Return what DATA frames have brought on a stream."""
    return b"".join(f.payload for f in frames if (f.kind, f.stream) == (Kind.DATA, stream))


def answer(stream: ServerStream, body: bytes = b"") -> bool:
    """Send a whole answer with one message."""
    message = PREFIX.pack(0, len(body)) + body
    return stream.answer(OK, [message], len(message), STATUS)
