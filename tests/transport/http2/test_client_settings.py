"""Client settings and their effect on what the server sends (RFC 9113 4.3.1, 6.5.2)."""

from collections.abc import Callable, Mapping

import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest
from support.frames import (
    PREFACE,
    Frame,
    Kind,
    Setting,
    data,
    headers,
    literals,
    settings,
    window_update,
)
from support.memory_client import (
    LINES,
    MESSAGE,
    OK,
    REQUEST,
    STATUS,
    MemoryClient,
    Streaming,
    Unary,
    answer,
)

from xlaserve.grpc.http2.messages import PREFIX
from xlaserve.grpc.http2.stream import ServerStream

UPDATE = b"\x20"
"""Dynamic Table Size Update to 0 (RFC 7541 6.3)."""
LONG = bytes(50_000)
FRAME = 16_384


def asked(*values: tuple[int, int], route: Unary | Streaming | None = None) -> MemoryClient:
    """Return a client that has sent these settings, and then four requests."""
    client = MemoryClient(route)
    client.send(settings(*values), window_update(0, 1 << 20))
    for stream in (1, 3, 5, 7):
        client.send(headers(stream, REQUEST), data(stream, MESSAGE, end_stream=True))
    client.taken()
    return client


def blocks(client: MemoryClient) -> list[bytes]:
    """Return the header blocks received since the last call."""
    return [frame.payload for frame in client.taken() if frame.kind == Kind.HEADERS]


def table_of(size: int) -> tuple[int, int]:
    return Setting.HEADER_TABLE_SIZE, size


# # --- 4.3.1: the encoder's table, which is never used --------------------------------------------


def _piecemeal(stream: ServerStream) -> None:
    stream.send_headers(OK)
    stream.send_data([MESSAGE], len(MESSAGE))
    stream.send_headers(STATUS, end=True)


ANSWERS: Mapping[str, tuple[Callable[[ServerStream], object], list[bytes]]] = {
    "whole": (answer, [OK, STATUS]),
    "long": (lambda stream: answer(stream, LONG), [OK, STATUS]),
    "in parts": (_piecemeal, [OK, STATUS]),
    "a status alone": (lambda stream: stream.send_headers(STATUS, end=True), [STATUS]),
}


@pytest.mark.parametrize("way", ANSWERS)
@pytest.mark.parametrize("size", [0, 1, 4095])
def test_the_next_block_says_that_a_smaller_table_is_smaller(way: str, size: int) -> None:
    """RFC 9113 4.3.1: otherwise the client ends the connection with COMPRESSION_ERROR."""
    client = asked(table_of(size))
    send, expected = ANSWERS[way]
    sent = []
    for stream in (1, 3):
        send(client.route.streams[stream])
        sent += blocks(client)

    assert [UPDATE + expected[0], *expected[1:], *expected] == sent


@pytest.mark.parametrize("way", ANSWERS)
@pytest.mark.parametrize("size", [4096, 4097, 2**32 - 1])
def test_a_larger_table_changes_nothing(way: str, size: int) -> None:
    client = asked(table_of(size))
    send, expected = ANSWERS[way]
    send(client.route.streams[1])

    assert expected == blocks(client)


def test_a_smaller_table_that_was_made_wider_again_is_told_as_well() -> None:
    """RFC 7541 4.2: the smallest maximum since the last block must be signalled."""
    client = asked(table_of(0), table_of(4096))
    answer(client.route.streams[1])

    assert [UPDATE + OK, STATUS] == blocks(client)


def test_a_table_of_0_is_told_once() -> None:
    """It cannot shrink further; a wider table that the client allows later is not used."""
    client = asked(table_of(0))
    answer(client.route.streams[1])
    client.taken()
    client.send(settings(table_of(4096)), settings(table_of(0)))
    answer(client.route.streams[3])

    assert [OK, STATUS] == blocks(client)


def test_it_is_told_in_trailers_when_the_headers_have_left_already() -> None:
    client = asked()
    client.route.streams[1].send_headers(OK)
    client.taken()
    client.send(settings(table_of(0)))
    client.route.streams[1].send_headers(STATUS, end=True)
    answer(client.route.streams[3])

    assert [UPDATE + STATUS, OK, STATUS] == blocks(client)


def test_it_is_told_behind_the_acknowledgement() -> None:
    """6.5.3: the client applies its new value when it reads the acknowledgement."""
    client = MemoryClient()
    client.send(headers(1, REQUEST), data(1, MESSAGE, end_stream=True), settings(table_of(0)))
    answer(client.route.streams[1])

    sent = [(f.kind, f.payload) for f in client.all + client.taken()]
    assert sent.index((Kind.SETTINGS, b"")) < sent.index((Kind.HEADERS, UPDATE + OK))


def test_an_answer_that_finds_no_memory_leaves_it_to_the_next_one() -> None:
    client = MemoryClient(limit=1000)
    client.send(settings(table_of(0), (Setting.INITIAL_WINDOW_SIZE, 0)))
    for stream in (1, 3):
        client.send(headers(stream, REQUEST), data(stream, MESSAGE, end_stream=True))
    client.taken()
    assert not answer(client.route.streams[1], bytes(2000))
    assert [] == blocks(client)
    client.route.streams[3].send_headers(STATUS, end=True)

    assert [UPDATE + STATUS] == blocks(client)


@pytest.mark.parametrize("size", [FRAME - 1, FRAME, FRAME + 1])
def test_it_takes_part_in_the_cutting_of_a_long_block(size: int) -> None:
    """4.2: the update must not make a frame exceed the limit."""
    client = asked(table_of(0))
    block = bytes(size)
    client.route.streams[1].send_headers(block)
    sent = client.taken()

    assert UPDATE + block == b"".join(frame.payload for frame in sent)
    assert FRAME >= max(len(frame.payload) for frame in sent)


class _H2:
    """h2 as a client of our engine."""

    def __init__(self) -> None:
        self.server = MemoryClient(greets=False)
        self.h2 = h2.connection.H2Connection()
        self.h2.initiate_connection()
        self.events: list[h2.events.Event] = []
        self.exchange()

    def exchange(self) -> None:
        while said := self.h2.data_to_send():
            self.server.core.receive(said)
            self.take()

    def take(self) -> None:
        octets = b"".join(map(bytes, self.server.taken()))
        if octets:
            self.events += self.h2.receive_data(octets)

    def ask(self, stream: int) -> dict[str, str]:
        """Send a request, have it answered, and return the decoded response headers."""
        self.h2.send_headers(stream, [*LINES, (":authority", "a")])
        self.h2.send_data(stream, MESSAGE, end_stream=True)
        self.exchange()
        self.server.route.streams[stream].answer(OK, [MESSAGE], len(MESSAGE), STATUS)
        self.take()
        lines: dict[str, str] = {}
        for event in self.events:
            if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                lines.update(
                    (bytes(name).decode(), bytes(value).decode()) for name, value in event.headers
                )
        return lines


@pytest.mark.parametrize("sizes", [(0,), (100,), (4095,), (0, 4096), (4096, 0), (8192, 1, 0)])
def test_h2_reads_our_blocks_whatever_table_it_wants(sizes: tuple[int, ...]) -> None:
    """A strict decoder (RFC 7541 4.2)."""
    client = _H2()
    for number, size in enumerate(sizes):
        client.h2.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: size})
        client.exchange()
        lines = client.ask(2 * number + 1)

        assert {":status": "200", "grpc-status": "0"} == lines


# --- 6.5.2 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [FRAME, FRAME + 1, 40_000, 2**24 - 1])
def test_no_frame_is_longer_than_the_client_takes(size: int) -> None:
    """4.2: this holds for DATA and for header blocks."""
    client = asked((Setting.MAX_FRAME_SIZE, size), (Setting.INITIAL_WINDOW_SIZE, 1 << 20))
    long = literals([("x", "y" * 45_000)])
    stream = client.route.streams[1]
    message = PREFIX.pack(0, len(LONG)) + LONG
    stream.answer(OK, [message], len(message), long)
    sent = client.taken()

    assert message == _joined(sent, {Kind.DATA})
    assert OK + long == _joined(sent, {Kind.HEADERS, Kind.CONTINUATION})
    assert min(size, len(message)) == max(len(frame.payload) for frame in sent)


def _joined(frames: list[Frame], kinds: set[Kind]) -> bytes:
    return b"".join(frame.payload for frame in frames if frame.kind in kinds)


def test_the_header_list_that_a_client_wants_at_most_is_advice() -> None:
    """6.5.2: a longer answer is sent nevertheless, and the client may discard it."""
    client = asked((Setting.MAX_HEADER_LIST_SIZE, 1))
    answer(client.route.streams[1])

    assert [OK, STATUS] == blocks(client)


def test_streams_that_a_client_allows_are_those_that_a_server_would_open() -> None:
    """5.1.2: the server opens no streams, so 0 changes nothing."""
    client = asked((Setting.MAX_CONCURRENT_STREAMS, 0))
    answer(client.route.streams[1])

    assert [OK, STATUS] == blocks(client)


def test_the_window_of_a_new_stream_is_that_of_the_settings_before_its_headers() -> None:
    """6.9.2: windows of open streams change with the setting."""
    client = MemoryClient()
    for stream, window in ((1, 4), (3, 9), (5, 2)):
        client.send(settings((Setting.INITIAL_WINDOW_SIZE, window)))
        client.send(headers(stream, REQUEST), data(stream, MESSAGE, end_stream=True))
    sent = {}
    for stream in (5, 3, 1):
        answer(client.route.streams[stream], LONG)
        sent[stream] = [f.payload for f in client.taken() if f.kind == Kind.DATA]

    assert {5: [2], 3: [2], 1: [2]} == {n: [len(p) for p in ps] for n, ps in sent.items()}


def test_the_preface_and_settings_may_come_with_the_first_request() -> None:
    """3.4: a client need not wait for the server's preface."""
    client = MemoryClient(greets=False)
    client.send(
        PREFACE, settings(table_of(0)), headers(1, REQUEST), data(1, MESSAGE, end_stream=True)
    )
    client.taken()
    answer(client.route.streams[1])

    assert [UPDATE + OK, STATUS] == blocks(client)
