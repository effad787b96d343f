"""Answers stay within both windows, alternate, and are parked up to a limit (RFC 9113, 5.2)."""

import weakref
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from support.frames import (
    PREFACE,
    Flag,
    Frame,
    Kind,
    data,
    headers,
    literals,
    parse,
    rst_stream,
    settings,
    window_update,
)

from xlaserve.grpc.http2.connection import ServerConnection
from xlaserve.grpc.http2.limits import Http2Limits, Shared
from xlaserve.grpc.http2.messages import Placement
from xlaserve.grpc.http2.sending import FLUSH_BYTES
from xlaserve.grpc.http2.stream import ServerStream
from xlaserve.net.ledger import Kind as Kept
from xlaserve.net.ledger import Ledger
from xlaserve.net.memory import MessageMemory

REQUEST = literals([(":method", "POST"), (":scheme", "http"), (":path", "/a")])
MESSAGE = b"\0\0\0\0\0"
HEAD, TRAILERS = b"\x88", literals([("grpc-status", "0")])
INITIAL_WINDOW = 4


class Client:
    """An in-memory connection whose requests wait until the test answers them."""

    message_first = True
    placement: Placement | None = None

    def __init__(self, limit: int = 1 << 30) -> None:
        self.ledger = Ledger(limit)
        shared = Shared(self.ledger, MessageMemory(0))
        self.core = ServerConnection(Http2Limits(), lambda head: self, shared)
        self.streams: dict[int, ServerStream] = {}
        self.core.start()
        self.core.receive(PREFACE)

    def begin(self, stream: ServerStream) -> None:
        self.streams[stream.id] = stream

    def send(self, *frames: Frame) -> list[Frame]:
        self.core.receive(b"".join(map(bytes, frames)))
        return self.sent()

    def sent(self) -> list[Frame]:
        """Return the frames sent since the last call."""
        octets = b""
        while self.core.output:
            octets += b"".join(self.core.take_output())
            self.core.pump()
        frames, rest = parse(octets)
        assert not rest
        return frames

    def request(self, number: int) -> ServerStream:
        self.send(headers(number, REQUEST), data(number, MESSAGE, end_stream=True))
        return self.streams[number]


@pytest.fixture
def client() -> Client:
    """A client with a stream window of four bytes."""
    made = Client()
    made.send(settings((INITIAL_WINDOW, 4)))
    return made


def bytes_of(frames: list[Frame], stream: int) -> bytes:
    return b"".join(f.payload for f in frames if (f.kind, f.stream) == (Kind.DATA, stream))


def answer(stream: ServerStream, body: bytes) -> bool:
    return stream.answer(HEAD, [body[:3], memoryview(body)[3:]], len(body), TRAILERS)


def test_an_answer_waits_for_the_window_of_its_stream(client: Client) -> None:
    stream = client.request(1)
    assert answer(stream, b"0123456789")
    first = client.sent()
    second = client.send(window_update(1, 5))
    last = client.send(window_update(1, 100))

    assert (b"0123", b"45678", b"9") == tuple(bytes_of(f, 1) for f in (first, second, last))
    assert (Kind.HEADERS, TRAILERS) == (last[-1].kind, last[-1].payload)
    assert last[-1].flags & Flag.END_STREAM
    assert not client.core.streams


def test_a_changed_setting_counts_for_open_streams(client: Client) -> None:
    """RFC 9113, 6.9.2."""
    stream = client.request(1)
    answer(stream, b"0123456789")
    client.sent()
    narrowed = client.send(settings((INITIAL_WINDOW, 2)))
    widened = client.send(settings((INITIAL_WINDOW, 9)))

    assert b"" == bytes_of(narrowed, 1)
    assert b"45678" == bytes_of(widened, 1)


def test_an_answer_waits_for_the_window_of_the_connection() -> None:
    client = Client()
    client.send(settings((INITIAL_WINDOW, 1 << 20)))
    stream = client.request(1)
    answer(stream, bytes(70_000))
    first = client.sent()
    last = client.send(window_update(0, 100_000))

    assert (65_535, 70_000 - 65_535) == (len(bytes_of(first, 1)), len(bytes_of(last, 1)))


def test_frames_are_as_long_as_the_client_takes_them() -> None:
    client = Client()
    client.send(settings((INITIAL_WINDOW, 1 << 20), (5, 20_000)), window_update(0, 1 << 20))
    answer(client.request(1), bytes(50_000))

    lengths = [len(f.payload) for f in client.sent() if f.kind == Kind.DATA]

    assert [20_000, 20_000, 10_000] == lengths


def test_large_answers_take_turns() -> None:
    """No answer waits until another is complete."""
    client = Client()
    client.send(settings((INITIAL_WINDOW, 1 << 30)))
    for number in (1, 3, 5):
        answer(client.request(number), bytes(200_000))
    client.sent()
    frames = client.send(window_update(0, 9 * 16_384))
    turns = Counter(f.stream for f in frames if f.kind == Kind.DATA)

    assert {3, 5} <= set(turns)
    assert max(turns.values()) - min(turns.values()) <= 1


def test_nothing_but_control_frames_leaves_while_the_transport_waits(client: Client) -> None:
    client.send(settings((INITIAL_WINDOW, 1000)))
    stream = client.request(1)
    client.core.pause()
    answer(stream, b"0123456789")
    waiting = client.sent()
    client.core.resume()
    after = client.sent()

    assert (b"", b"0123456789") == (bytes_of(waiting, 1), bytes_of(after, 1))


def reset(client: Client) -> None:
    client.send(rst_stream(1))


def lose(client: Client) -> None:
    client.core.lost()


def read(client: Client) -> None:
    client.send(window_update(1, 1000))


@pytest.mark.parametrize("end", [reset, lose, read])
def test_what_is_parked_is_counted_until_it_is_over(
    client: Client, end: Callable[[Client], None]
) -> None:
    answer(client.request(1), b"0123456789")
    client.sent()
    parked = client.ledger.held_for(Kept.ANSWERS)
    end(client)

    assert (6, 0) == (parked, client.ledger.held_for(Kept.ANSWERS))
    assert not client.core.streams


def waits_for(client: Client, kind: str) -> None:
    """Let the client delay the next answer: by its windows, or by not reading."""
    if kind == "it does not read":
        client.send(settings((INITIAL_WINDOW, 1000)))
        client.core.pause()
    elif kind == "the window of the connection":
        client.send(settings((INITIAL_WINDOW, 1 << 20)))


HOLDS = ["the window of the stream", "the window of the connection", "it does not read"]


@pytest.mark.parametrize("kind", HOLDS)
def test_a_row_that_waits_does_not_keep_the_batch_that_it_is_of(client: Client, kind: str) -> None:
    """The memory budget counts the row only."""
    waits_for(client, kind)
    batch = np.zeros((10, 80_000), np.uint8)  # owns its data
    batch += np.arange(10, dtype=np.uint8)[:, None]
    rows = [bytes(row) for row in batch]
    stream = client.request(1)
    stream.answer(HEAD, [b"abc", batch[7:8].data.cast("B")], 80_003, TRAILERS)
    before = bytes_of(client.sent(), 1)
    held = weakref.ref(batch)
    del batch
    kept = held() is not None
    client.core.resume()
    after = bytes_of(client.send(window_update(0, 1 << 20), window_update(1, 1 << 20)), 1)

    assert not kept
    assert client.ledger.held_for(Kept.ANSWERS) == 0
    assert b"abc" + rows[7] == before + after


def test_an_answer_that_waits_by_itself_is_not_copied(client: Client) -> None:
    """The unsent remainder is not copied either, however small it is."""
    whole = np.zeros(80_000, np.uint8)
    client.request(1).answer(HEAD, [b"abc", whole[None].data.cast("B")], 80_003, TRAILERS)
    held = weakref.ref(whole)
    del whole
    kept = [held() is not None]
    for _ in range(3):
        client.send(window_update(1, 20_000))
        kept.append(held() is not None)

    assert [True] * 4 == kept


def test_an_answer_that_there_is_no_room_for_is_not_begun() -> None:
    client = Client(limit=15)
    client.send(settings((INITIAL_WINDOW, 4)))
    first, second = client.request(1), client.request(3)

    assert answer(first, b"0123456789")
    assert not answer(second, b"0123456789")
    frames = client.sent()
    assert {1} == {f.stream for f in frames if f.kind in (Kind.HEADERS, Kind.DATA)}

    second.send_headers(TRAILERS, end=True)
    assert client.sent()[-1].stream == 3


def test_data_without_room_is_not_begun() -> None:
    client = Client(limit=5)
    client.send(settings((INITIAL_WINDOW, 4)))
    stream = client.request(1)
    stream.send_headers(HEAD)

    assert not stream.send_data([b"0123456789"], 10)
    assert stream.send_data([b"0123"], 4, end=True)
    assert b"0123" == bytes_of(client.sent(), 1)


def test_an_empty_end_is_a_frame_of_its_own(client: Client) -> None:
    stream = client.request(1)
    stream.send_headers(HEAD)
    stream.send_data([b"0123"], 4)
    stream.send_data([], 0, end=True)
    last = client.sent()[-1]

    assert (Kind.DATA, Flag.END_STREAM, b"") == (last.kind, last.flags, last.payload)


def test_nothing_is_sent_on_a_stream_that_is_over(client: Client) -> None:
    stream = client.request(1)
    client.send(rst_stream(1))

    assert answer(stream, b"0123")
    stream.send_headers(TRAILERS, end=True)
    stream.reset()
    assert [] == client.sent()


def test_a_header_block_longer_than_a_frame_goes_on_in_others(client: Client) -> None:
    """RFC 9113, 6.10: CONTINUATION frames follow."""
    stream = client.request(1)
    block = literals([("a", "b" * 40_000)])
    stream.send_headers(block, end=True)
    frames = client.sent()

    assert [Kind.HEADERS, Kind.CONTINUATION, Kind.CONTINUATION] == [f.kind for f in frames]
    assert block == b"".join(f.payload for f in frames)
    assert [False, False, True] == [bool(f.flags & Flag.END_HEADERS) for f in frames]


def test_a_long_answer_is_asked_for_however_wide_its_window_is() -> None:
    """More than a flush of it waits for the transport, which may pause at any time."""
    client = Client(limit=4 * FLUSH_BYTES)
    client.send(settings((INITIAL_WINDOW, 1 << 30)), window_update(0, 1 << 30))
    first, second = client.request(1), client.request(3)

    assert not answer(first, bytes(3 * FLUSH_BYTES + 1))
    assert answer(second, bytes(3 * FLUSH_BYTES))
