"""Messages are assembled from any division into pieces."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.grpc.http2.messages import (
    _IN_PLACE_BYTES,
    Placement,
    Problem,
    StreamingReader,
    UnaryReader,
)
from xlaserve.net.memory import MessageMemory, Octets, fresh
from xlaserve.tensors import ALIGNMENT

LIMIT = 1000


def unary(limit: int = LIMIT, placement: Placement | None = None) -> UnaryReader:
    return UnaryReader(limit, placement, MessageMemory(0).take)


def framed(message: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


def cut(octets: bytes, at: list[int]) -> list[memoryview]:
    edges = [0, *sorted(position % (len(octets) + 1) for position in at), len(octets)]
    return [memoryview(octets)[a:b] for a, b in itertools.pairwise(edges)]


@given(st.binary(max_size=300), st.sampled_from([0, 1]), st.lists(st.integers(0, 310), max_size=8))
def test_a_message_is_whole_however_it_was_cut(message: bytes, flag: int, at: list[int]) -> None:
    reader = unary()
    problems = {reader.feed(chunk) for chunk in cut(framed(message, flag), at)}

    assert {None} == problems
    assert (None, message, bool(flag)) == (reader.end(), reader.message(), reader.compressed)


@given(st.lists(st.binary(max_size=60), max_size=6), st.lists(st.integers(0, 400), max_size=8))
def test_messages_of_a_stream_come_in_their_order(messages: list[bytes], at: list[int]) -> None:
    reader = StreamingReader(LIMIT, lambda: None)
    found = []
    for chunk in cut(b"".join(map(framed, messages)), at):
        reader.feed(chunk)
        while (got := reader.next()) is not None:
            assert isinstance(got, tuple)
            found.append(got[1])

    assert (messages, None) == (found, reader.end())


@pytest.mark.parametrize(
    ("octets", "problem"),
    [
        (b"", Problem.NONE),
        (b"\0\0\0", Problem.TRUNCATED),
        (framed(b"abc")[:-1], Problem.TRUNCATED),
        (framed(b"abc") + b"\0", Problem.SECOND),
        (framed(b"abc", flag=2), Problem.FLAG),
        (b"\0\xff\xff\xff\xff", Problem.TOO_LARGE),
        (framed(bytes(LIMIT + 1)), Problem.TOO_LARGE),
    ],
)
def test_what_is_no_single_message_is_named(octets: bytes, problem: Problem) -> None:
    reader = unary()

    assert problem is (reader.feed(memoryview(octets)) or reader.end())


@pytest.mark.parametrize(
    ("octets", "problem"),
    [(framed(b"a", flag=2), Problem.FLAG), (b"\0\xff\xff\xff\xff", Problem.TOO_LARGE)],
)
def test_a_stream_stops_at_a_prefix_that_is_wrong(octets: bytes, problem: Problem) -> None:
    reader = StreamingReader(LIMIT, lambda: None)
    reader.feed(memoryview(octets))

    assert problem is reader.next()


def test_a_long_message_is_placed_so_that_its_tensor_is_aligned() -> None:
    size, begins = 1 << 17, 37
    reader = unary(1 << 20, lambda first, length: begins)
    message = np.arange(size, dtype=np.uint8).tobytes()
    octets = memoryview(framed(message))
    reader.feed(octets[:100])
    space = reader.space()
    assert space is not None
    space[:] = octets[100:]
    reader.filled += len(space)
    placed = reader.message()

    assert message == placed
    assert 0 == (np.frombuffer(placed, np.uint8).ctypes.data + begins) % ALIGNMENT


@pytest.mark.parametrize(("length", "in_place"), [(0, True), (-1, False)])
def test_a_message_is_received_in_place_from_a_length_on(length: int, in_place: bool) -> None:
    """A shorter message has an ordinary buffer, without use of the message memory."""
    asked: list[int] = []

    def take(size: int) -> Octets:
        asked.append(size)
        return fresh(size)

    length += _IN_PLACE_BYTES
    reader = UnaryReader(1 << 20, None, take)
    assert reader.feed(memoryview(framed(bytes(length)))[:6]) is None
    space = reader.space()

    assert [length + ALIGNMENT] * in_place == asked
    assert (length - 1 if in_place else None) == (None if space is None else len(space))


def test_nothing_may_follow_an_empty_message() -> None:
    reader = unary()

    assert reader.feed(memoryview(framed(b""))) is None
    assert (0, b"") == (reader.missing, reader.message())
    assert Problem.SECOND is reader.feed(memoryview(b"\0"))


def test_a_message_of_the_limit_is_taken_and_one_more_byte_is_not() -> None:
    for reader in (unary(), StreamingReader(LIMIT, lambda: None)):
        message = memoryview(framed(bytes(LIMIT)))
        assert reader.feed(message[:5]) is None
        assert LIMIT == reader.missing
        assert reader.feed(message[5:]) is None
        assert 0 == reader.missing
        if isinstance(reader, StreamingReader):
            assert (False, bytes(LIMIT)) == reader.next()
    over = StreamingReader(LIMIT, lambda: None)
    over.feed(memoryview(framed(bytes(LIMIT + 1))))

    assert Problem.TOO_LARGE is over.next()


def test_what_is_missing_is_known_with_the_last_byte_of_the_prefix() -> None:
    for reader in (unary(), StreamingReader(LIMIT, lambda: None)):
        for number, expected in enumerate((0, 0, 0, 0, 100)):
            reader.feed(memoryview(framed(bytes(100)))[number : number + 1])
            assert expected == reader.missing


def test_what_is_missing_is_known_as_soon_as_the_prefix_is() -> None:
    for reader in (unary(), StreamingReader(LIMIT, lambda: None)):
        reader.feed(memoryview(framed(bytes(100))[:4]))
        assert 0 == reader.missing
        reader.feed(memoryview(framed(bytes(100))[4:15]))
        assert 90 == reader.missing
