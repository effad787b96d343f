"""Our HTTP/2 core with a route that answers like the reference."""

from support.frames import LARGEST_FRAME, literals
from support.http2_reference import (
    CONNECTION_WINDOW,
    HARD_HEADER_BYTES,
    HEAD,
    MAX_HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_STREAMS,
    STREAM_WINDOW,
    TRAILERS,
    answer_to,
    refusal,
)
from xlaserve.grpc.http2.connection import ReceiveBuffer, ServerConnection
from xlaserve.grpc.http2.headers import HARD_FACTOR
from xlaserve.grpc.http2.limits import Http2Limits, Shared
from xlaserve.grpc.http2.messages import Placement
from xlaserve.grpc.http2.stream import ServerStream
from xlaserve.grpc.http2.streams import ANSWERED_SECONDS
from xlaserve.net.ledger import Ledger
from xlaserve.net.memory import MessageMemory

assert HARD_HEADER_BYTES == MAX_HEADER_BYTES * HARD_FACTOR

_PLENTY = 1 << 40
_LIMITS = Http2Limits(
    max_message_bytes=MAX_MESSAGE_BYTES,
    max_streams=MAX_STREAMS,
    max_header_bytes=MAX_HEADER_BYTES,
    max_frame_bytes=LARGEST_FRAME,
    stream_window_bytes=STREAM_WINDOW,
    connection_window_bytes=CONNECTION_WINDOW,
    max_resets=_PLENTY,
    max_control_frames=_PLENTY,
)
_HEAD, _TRAILERS = literals(HEAD), literals(TRAILERS)
_BUFFER = ReceiveBuffer()


class _Answering:
    message_first = True
    placement: Placement | None = None

    def begin(self, stream: ServerStream) -> None:
        if stream.problem is not None:
            stream.send_headers(literals(refusal(stream.problem.name)), end=True)
            return
        body = answer_to(stream.head.path)
        stream.answer(_HEAD, [body], len(body), _TRAILERS)


class Core:
    """The server side of one connection."""

    def __init__(self) -> None:
        shared = Shared(Ledger(_PLENTY), MessageMemory(0))
        route = _Answering()
        self._now = 0.0
        self._core = ServerConnection(
            _LIMITS, lambda head: route, shared, buffer=_BUFFER, now=lambda: self._now
        )
        self._core.start()
        self._core.take_output()

    @property
    def dead(self) -> bool:
        """Whether the core has ended the connection."""
        return self._core.failed is not None

    def receive(self, data: bytes) -> bytes:
        """Process bytes and return the output, after enough simulated time to reset
        answered streams.
        """
        self._core.receive(data)
        self._now += ANSWERED_SECONDS
        self._core.sweep(_PLENTY, _PLENTY)
        said = []
        while self._core.output:
            said += self._core.take_output()
            self._core.pump()
        return b"".join(said)

    def states(self) -> dict[int, str]:
        """Return the states of the streams that are not closed."""
        return {number: stream.state.name for number, stream in self._core.streams.items()}
