"""The client with varying headers: what it sends, and which answers it accepts."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import hpack
import pytest
from support.frames import Frame, Kind, parse

from comparison.varying import FORMS, GREETING, Http1Speaker, Http2Speaker, drive, identity_load

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"


def blocks(form: str, *, vary: bool) -> list[dict[str, str]]:
    """Return the headers of the first requests of a load, as decoded by a server."""
    decoder = hpack.Decoder()
    found: list[dict[str, str]] = []
    for request in identity_load("grpc", 1, "1x1", form, vary=vary, count=200).requests:
        (headers, data), rest = parse(request)
        assert (Kind.HEADERS, Kind.DATA, b"") == (headers.kind, data.kind, rest)
        assert (2 * len(found) + 1,) * 2 == (headers.stream, data.stream)
        found.append({str(name): str(value) for name, value in decoder.decode(headers.payload)})
    return found


@pytest.mark.parametrize("form", FORMS)
def test_headers_vary_in_every_form(form: str) -> None:
    equal, varying = blocks(form, vary=False), blocks(form, vary=True)
    own = {"grpc-timeout", "traceparent", "x-request-id", "authorization"}

    assert all(one == equal[0] for one in equal)
    assert equal[0] == varying[0]
    for name in equal[0]:
        assert len({one[name] for one in varying}) == (200 if name in own else 1), name


def test_a_form_is_written_as_it_says() -> None:
    """RFC 7541, 6.2: the prefix bits of a literal field."""
    last = {
        form: identity_load("grpc", 1, "1x1", form, vary=True, count=50).requests[-1]
        for form in FORMS
    }

    assert {b"\x83"} == {request[9:10] for request in last.values()}  # the constant ones first
    assert b"\x00\x0cgrpc-timeout" in last["literal"]
    assert b"\x10\x0cgrpc-timeout" in last["never"]
    assert b"grpc-timeout" not in b"".join(last[form] for form in last if "huffman" in form)
    assert b"grpc-timeout" not in last["indexed"]


def test_http2_answers_are_streams_that_end() -> None:
    speaker = Http2Speaker()
    answer = b"".join(
        map(
            bytes,
            (
                Frame(Kind.SETTINGS, 0, 0, b""),
                Frame(Kind.PING, 0, 0, b"8 octets"),
                Frame(Kind.HEADERS, 4, 1, b"\x88"),
                Frame(Kind.DATA, 0, 1, b"abc"),
                Frame(Kind.HEADERS, 5, 1, b""),
            ),
        )
    )
    ended = sum(speaker.answered(answer[place : place + 1]) for place in range(len(answer)))

    assert (1, [1], 3) == (ended, speaker.ended, speaker.data_bytes)
    replies, rest = parse(speaker.reply())
    assert [(Kind.SETTINGS, 1), (Kind.PING, 1)] == [(one.kind, one.flags) for one in replies]
    assert (b"", b"") == (rest, speaker.reply())
    with pytest.raises(ValueError, match="a frame of type 3"):
        speaker.answered(bytes(Frame(Kind.RST_STREAM, 0, 1, b"1234")))


def test_http1_answers_have_a_length_and_a_status() -> None:
    speaker = Http1Speaker()

    assert [0, 0, 1] == [speaker.answered(part) for part in (OK[:9], OK[9:-1], OK[-1:])]
    assert 3 == speaker.data_bytes
    with pytest.raises(ValueError, match="503"):
        speaker.answered(OK.replace(b"200 OK", b"503 No"))


@contextmanager
def answering(answer: Callable[[int], bytes]) -> Iterator[int]:
    """Answer each piece of a request received on any connection; yields the port."""

    def serve(client: socket.socket) -> None:
        with client, suppress(ConnectionError):
            count = 0
            while client.recv(1 << 16):
                count += 1
                client.sendall(answer(count))

    def accept(listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_a_rate_and_a_processor_time_are_measured() -> None:
    with answering(lambda count: OK) as port:
        found = drive(identity_load("rest", port, "1x2", vary=True), os.getpid(), 0.2, 0.05)

    assert found["rps"] > 0
    assert found["cpu_us"] >= 0


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda count: OK if count < 9 else OK.replace(b"200", b"500"), "500"),
        (lambda count: OK if count < 9 else OK.replace(b"3", b"1")[:-2], "answers of"),
    ],
)
def test_what_is_no_answer_fails(answer: Callable[[int], bytes], error: str) -> None:
    with answering(answer) as port:
        found = drive(identity_load("rest", port, "1x1", vary=False), os.getpid(), 0.3, 0.0005)

    assert error in found["error"]


def test_the_greeting_leaves_answers_room() -> None:
    (settings, window), rest = parse(GREETING.partition(b"SM\r\n\r\n")[2])

    assert (Kind.SETTINGS, Kind.WINDOW_UPDATE, b"") == (settings.kind, window.kind, rest)
