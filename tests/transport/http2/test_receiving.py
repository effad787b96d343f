"""Messages arrive whole within the windows, for any framing and reads (RFC 9113, 5.2)."""

from random import Random

import pytest
from support.frames import PREFACE, Kind, data, headers, literals, parse, settings

from xlaserve.grpc.http2.connection import ServerConnection
from xlaserve.grpc.http2.frames import DEFAULT_WINDOW
from xlaserve.grpc.http2.limits import Http2Limits, Shared
from xlaserve.grpc.http2.messages import PREFIX, PREFIX_BYTES, Placement
from xlaserve.grpc.http2.stream import ServerStream
from xlaserve.net.ledger import Ledger
from xlaserve.net.memory import MessageMemory

REQUEST = literals([(":method", "POST"), (":scheme", "http"), (":path", "/a")])
WINDOW = 1 << 18
LIMITS = Http2Limits(
    stream_window_bytes=WINDOW, connection_window_bytes=WINDOW, max_frame_bytes=1 << 17
)
PLENTY = 1 << 40


class Client:
    """An in-memory connection that sends what the windows allow, in reads of any size."""

    message_first = True
    placement: Placement | None = None

    def __init__(self, random: Random, streams: int) -> None:
        self._random = random
        shared = Shared(Ledger(PLENTY), MessageMemory(0))
        self._ledger = shared.ledger
        self.core = ServerConnection(LIMITS, lambda head: self, shared)
        self.core.start()
        self.window = DEFAULT_WINDOW
        self.windows = {2 * number + 1: WINDOW for number in range(streams)}
        self.widened = dict.fromkeys(self.windows, 0)
        self.messages: dict[int, bytes] = {}
        self._unsent = PREFACE + bytes(settings())
        self._unsent += b"".join(bytes(headers(stream, REQUEST)) for stream in self.windows)
        self.exchange()

    def begin(self, stream: ServerStream) -> None:
        assert stream.problem is None
        assert stream.message is not None
        self.messages[stream.id] = bytes(stream.message)

    def exchange(self) -> None:
        """Deliver the pending bytes in pieces, and apply the WINDOW_UPDATE frames received."""
        while self._unsent:
            size = self._random.choice((1, 9, 100, 5000, 20_000, 1 << 17, 1 << 18))
            read, self._unsent = self._unsent[:size], self._unsent[size:]
            self.core.receive(read)
        frames, _ = parse(b"".join(self.core.take_output()))
        for frame in frames:
            if frame.kind == Kind.WINDOW_UPDATE:
                increment = int.from_bytes(frame.payload, "big")
                if frame.stream:
                    self.windows[frame.stream] += increment
                    self.widened[frame.stream] += 1
                else:
                    self.window += increment

    def send(self, stream: int, octets: bytes, *, end: bool = False) -> int:
        """Send as many bytes as the windows allow; return their number."""
        size = min(len(octets), self.windows[stream], self.window)
        if min(self.windows[stream], self.window) <= 0:
            self.exchange()
            return 0
        whole = size == len(octets)
        self.windows[stream] -= size
        self.window -= size
        self._unsent += bytes(data(stream, octets[:size], end_stream=end and whole))
        if self._random.random() < 0.1:
            self.exchange()
        return size


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("frame_bytes", [16_384, 1 << 17])
@pytest.mark.parametrize("streams", [1, 3])
def test_a_long_message_comes_whole_within_the_windows(
    streams: int, frame_bytes: int, seed: int
) -> None:
    """A client without a window cannot even send the empty frame that ends its request."""
    random = Random(f"{seed}")
    size = random.choice((WINDOW - PREFIX_BYTES, WINDOW, 70_000, 1 << 20, (1 << 20) + 77))
    client = Client(random, streams)
    messages = {stream: random.randbytes(size) for stream in client.windows}
    waiting = {stream: PREFIX.pack(0, size) + message for stream, message in messages.items()}
    for _ in range(10_000):
        for stream in tuple(waiting):
            sent = client.send(stream, waiting[stream][:frame_bytes])
            waiting[stream] = waiting[stream][sent:]
            if not waiting[stream]:
                del waiting[stream]
        if not waiting:
            break
    client.exchange()

    assert not waiting
    assert min(client.window, *client.windows.values()) > 0
    for stream in client.windows:
        client.send(stream, b"", end=True)
    client.exchange()
    assert messages == client.messages
    assert max(client.widened.values()) <= 1, "what is missing is granted at once"
