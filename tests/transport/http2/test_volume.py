"""Many windows of data on one connection arrive whole, both ways (RFC 9113 5.2, 6.9).

The client respects every window, and stalls if one is not widened; the server must respect them
too. Frames and reads have odd sizes.
"""

from collections.abc import Mapping
from random import Random

import pytest
from support.memory_client import Streaming, Unary, answer
from support.windowed_client import Sizes, WindowedClient

from xlaserve.grpc.http2.messages import PREFIX, PREFIX_BYTES, StreamingReader
from xlaserve.grpc.http2.stream import ServerStream

SMALL = 65_535
"""The smallest window that can be set."""

SIZES: Mapping[str, Sizes] = {
    "frames of one byte": lambda random: 1,
    "short frames": lambda random: random.randint(1, 50),
    "around 4 KB, where runs begin": lambda random: random.choice((4095, 4096, 4097)),
    "frames of 16 KB": lambda random: 16_384,
    "16 KB, and a byte more or less": lambda random: random.choice((16_383, 16_384, 16_385)),
    "frames of 64 KB": lambda random: 65_536,
    "any size": lambda random: random.choice((0, 1, 9, 4096, 10_000, 16_384, 16_385, 100_000)),
}
VOLUME: Mapping[str, int] = {"frames of one byte": 1, "short frames": 2}
"""Volume in windows, where it differs from forty."""


def made(random: Random, size: int) -> bytes:
    """Make a random message of this size, with its length prefix."""
    return PREFIX.pack(0, size) + random.randbytes(size)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("streams", [1, 3])
def test_long_messages_come_whole_through_small_windows(name: str, streams: int) -> None:
    """One message per stream, several windows of the stream and of the connection long."""
    random = Random(f"{name} {streams}")
    windows = VOLUME.get(name, 40)
    client = WindowedClient(
        random,
        route := Unary(),
        stream_window_bytes=SMALL,
        connection_window_bytes=SMALL,
        max_control_frames=10**6,
    )
    size = windows * SMALL // streams + random.randint(0, 1000)
    messages = {2 * n + 1: made(random, size) for n in range(streams)}
    for stream, octets in messages.items():
        client.open(stream, octets)
    client.upload(SIZES[name])

    assert client.charged >= windows * SMALL
    assert {n: octets[PREFIX_BYTES:] for n, octets in messages.items()} == route.messages
    assert client.window >= SMALL // 2


@pytest.mark.parametrize("size", [5, 300, 10_000, 40_000])
@pytest.mark.parametrize("padding", [0, 1, 255])
def test_many_messages_come_whole_through_small_windows(size: int, padding: int) -> None:
    """One or two frames per message: the fast path must charge the windows as well."""
    random = Random(f"{size} {padding}")
    client = WindowedClient(
        random, route := Unary(), connection_window_bytes=SMALL, max_control_frames=10**6
    )
    count = 0
    while client.charged < 5 * SMALL and count < 1500:
        stream = 2 * count + 1
        count += 1
        client.open(stream, octets := made(random, size))
        client.upload(lambda random: 1 << 20, padding)
        assert route.messages.pop(stream) == octets[PREFIX_BYTES:]
        answer(route.streams.pop(stream), b"ok")
        client.download(1000)

    assert {*range(1, 2 * count, 2)} == client.ends
    assert 0 == client.ledger.held


@pytest.mark.parametrize("window", [1, 7, 1000, SMALL])
@pytest.mark.parametrize("streams", [1, 4])
def test_long_answers_come_whole_through_small_windows(window: int, streams: int) -> None:
    """The connection window equals the sum of the stream windows."""
    random = Random(f"{window} {streams}")
    client = WindowedClient(random, route := Unary(), window=window, max_control_frames=10**6)
    size = min(700 * window, 2_000_000) + random.randint(0, 100)
    bodies = {2 * n + 1: random.randbytes(size // streams) for n in range(streams)}
    for stream in bodies:
        client.open(stream, made(random, 3))
    client.upload(lambda random: 100)
    for stream, body in bodies.items():
        answer(route.streams[stream], body)
    client.download(window)

    for stream, body in bodies.items():
        assert PREFIX.pack(0, len(body)) + body == client.bodies[stream]
    assert set(bodies) == client.ends
    assert 0 == client.ledger.held


class Echoing(Streaming):
    """Echoes each message of a streaming request as soon as it is complete."""

    def begin(self, stream: ServerStream) -> None:
        self.streams[stream.id] = stream
        reader = StreamingReader(1 << 20, lambda: self._look(stream))
        stream.reader = reader
        stream.expect(1)

    def _look(self, stream: ServerStream) -> None:
        reader = stream.reader
        assert isinstance(reader, StreamingReader)
        if not stream.headers_sent:
            stream.send_headers(b"\x88")
        while isinstance(got := reader.next(), tuple):
            stream.hold(-PREFIX_BYTES - len(got[1]))
            octets = PREFIX.pack(0, len(got[1])) + got[1]
            stream.send_data([octets], len(octets))
        if stream.ended_by_client:
            assert reader.end() is None
            stream.send_data([], 0, end=True)
        else:
            stream.expect(reader.missing)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [100, SMALL])
def test_both_directions_at_once(seed: int, window: int) -> None:
    """Messages return on streams that are still being sent, within the windows of both sides."""
    random = Random(f"{seed} {window}")
    client = WindowedClient(
        random,
        Echoing(),
        window=window,
        stream_window_bytes=SMALL,
        connection_window_bytes=SMALL,
        max_control_frames=10**6,
    )
    most = 60 * window
    said = {}
    for number in range(3):
        messages = [made(random, random.randint(0, min(most, 300_000))) for _ in range(4)]
        said[2 * number + 1] = b"".join(messages)
        client.open(2 * number + 1, said[2 * number + 1])
    client.upload(lambda random: random.choice((1, 100, 5000, 16_384)))
    client.download(window)

    assert said == {stream: bytes(body) for stream, body in client.bodies.items()}
    assert set(said) == client.ends
    assert 0 == client.ledger.held


@pytest.mark.large
@pytest.mark.parametrize("streams", [1, 8])
def test_a_gigabyte_on_one_connection(streams: int) -> None:
    """That is sixty-four windows of the default size."""
    random = Random("gigabyte")
    client = WindowedClient(random, route := Unary(), max_control_frames=10**9, max_streams=10**6)
    body = made(random, (8 << 20) // streams)
    for round_ in range(128):
        numbers = [2 * (round_ * streams + n) + 1 for n in range(streams)]
        for stream in numbers:
            client.open(stream, body)
        client.upload(SIZES["any size"])
        for stream in numbers:
            assert route.messages.pop(stream) == body[PREFIX_BYTES:]
            answer(route.streams.pop(stream), b"ok")
        client.download(1000)
        client.all.clear()

    assert client.charged >= 1 << 30
    assert 0 == client.ledger.held
