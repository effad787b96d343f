"""Frames that we write, parsed by hyperframe (RFC 9113 6)."""

from collections.abc import Iterator

import pytest
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import given
from hypothesis import strategies as st
from support import frames as written_by_tests
from support.frames import data, headers, settings
from support.memory_client import MESSAGE, REQUEST, MemoryClient, answer

from xlaserve.grpc.http2 import frames
from xlaserve.grpc.http2.frames import ErrorCode, Setting

STREAMS = st.integers(1, frames.MAX_STREAM_ID)
CODES = st.sampled_from(ErrorCode)


def parsed(octets: bytes) -> Iterator[Frame]:
    """Read frames as hyperframe does."""
    view = memoryview(octets)
    while view:
        frame, length = Frame.parse_frame_header(view[: frames.HEADER_BYTES])
        frame.parse_body(view[frames.HEADER_BYTES : frames.HEADER_BYTES + length])
        view = view[frames.HEADER_BYTES + length :]
        yield frame


@given(st.integers(0, frames.LARGEST_MAX_FRAME), st.integers(0, 255), st.integers(0, 255), STREAMS)
def test_a_frame_header_is_nine_bytes(length: int, kind: int, flags: int, stream: int) -> None:
    """4.1."""
    octets = frames.frame_header(length, kind, flags, stream)

    assert written_by_tests.head(length, kind, flags, stream) == octets
    assert frames.HEADER.unpack(octets) == (length >> 8, length & 255, kind, flags, stream)


@given(st.dictionaries(st.sampled_from(Setting), st.integers(0, frames.MAX_WINDOW), max_size=6))
def test_settings(values: dict[Setting, int]) -> None:
    """6.5.1."""
    (frame,) = parsed(frames.settings(values))

    assert isinstance(frame, SettingsFrame)
    assert values == frame.settings
    assert not frame.flags


def test_the_acknowledgement_of_settings() -> None:
    """6.5."""
    (frame,) = parsed(frames.SETTINGS_ACK)

    assert isinstance(frame, SettingsFrame)
    assert {"ACK"} == set(frame.flags)


@given(st.binary(min_size=8, max_size=8))
def test_the_answer_to_a_ping(payload: bytes) -> None:
    """6.7."""
    (frame,) = parsed(frames.ping_ack(payload))

    assert isinstance(frame, PingFrame)
    assert (payload, {"ACK"}) == (frame.opaque_data, set(frame.flags))


@given(st.integers(0, frames.MAX_STREAM_ID), st.integers(1, frames.MAX_WINDOW))
def test_a_window_update(stream: int, increment: int) -> None:
    """6.9."""
    (frame,) = parsed(frames.window_update(stream, increment))

    assert isinstance(frame, WindowUpdateFrame)
    assert (stream, increment) == (frame.stream_id, frame.window_increment)


@given(STREAMS, CODES)
def test_a_reset(stream: int, code: ErrorCode) -> None:
    """6.4."""
    (frame,) = parsed(frames.rst_stream(stream, code))

    assert isinstance(frame, RstStreamFrame)
    assert (stream, code) == (frame.stream_id, frame.error_code)


@given(st.integers(0, frames.MAX_STREAM_ID), CODES, st.text("abc é", max_size=50))
def test_a_goaway(last: int, code: ErrorCode, reason: str) -> None:
    """6.8."""
    (frame,) = parsed(frames.goaway(last, code, reason))

    assert isinstance(frame, GoAwayFrame)
    assert (last, code) == (frame.last_stream_id, frame.error_code)
    assert reason.encode() == frame.additional_data


def test_the_numbers_are_those_of_the_registry() -> None:
    """6, 6.5.2, 7: compared with the constants of hyperframe and h2."""
    from h2.errors import ErrorCodes
    from h2.settings import SettingCodes

    assert {code.name: code.value for code in ErrorCodes} == {c.name: c.value for c in ErrorCode}
    theirs = {code.name: code.value for code in SettingCodes}
    assert all(theirs[setting.name] == setting.value for setting in Setting)
    kinds: dict[type[Frame], int] = {
        DataFrame: frames.DATA,
        HeadersFrame: frames.HEADERS,
        RstStreamFrame: frames.RST_STREAM,
        SettingsFrame: frames.SETTINGS,
        PingFrame: frames.PING,
        GoAwayFrame: frames.GOAWAY,
        WindowUpdateFrame: frames.WINDOW_UPDATE,
        ContinuationFrame: frames.CONTINUATION,
    }
    assert all(number == kind.type for kind, number in kinds.items())


SIZES = [0, 1, 100, 16_384, 16_385, 50_000]


@pytest.mark.parametrize("trailers", SIZES)
@pytest.mark.parametrize("body", SIZES)
def test_a_whole_answer(body: int, trailers: int) -> None:
    """8.1: HEADERS, DATA, and trailers with END_STREAM; 6.10 for long header blocks."""
    client = MemoryClient()
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 1 << 20)))
    client.send(headers(1, REQUEST), data(1, MESSAGE, end_stream=True))
    block = bytes(trailers)
    client.route.streams[1].answer(b"\x88", [bytes(body)], body, block)
    answered = list(parsed(b"".join(map(bytes, client.taken()))))

    assert isinstance(answered[0], HeadersFrame)
    assert b"\x88" == answered[0].data
    assert body == sum(len(f.data) for f in answered if isinstance(f, DataFrame))
    end = [f for f in answered[1:] if isinstance(f, HeadersFrame | ContinuationFrame)]
    assert block == b"".join(frame.data for frame in end)
    assert ["END_STREAM" in f.flags for f in answered] == [f is end[0] for f in answered]
    assert ["END_HEADERS" in f.flags for f in end] == [f is end[-1] for f in end]
    assert max(f.body_len for f in answered) <= 16_384


def test_answers_of_many_streams_are_frames_one_after_the_other() -> None:
    client = MemoryClient()
    numbers = range(1, 41, 2)
    for number in numbers:
        client.send(headers(number, REQUEST), data(number, MESSAGE, end_stream=True))
    for number in numbers:
        answer(client.route.streams[number], b"%d" % number)
    answered = list(parsed(b"".join(map(bytes, client.taken()))))

    assert [n for n in numbers for _ in range(3)] == [frame.stream_id for frame in answered]
    bodies = [frame.data[5:] for frame in answered if isinstance(frame, DataFrame)]
    assert [b"%d" % number for number in numbers] == bodies
