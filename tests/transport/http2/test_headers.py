"""Header blocks: what is known again, what is malformed, and what we write."""

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.transport.http2.errors import ConnectionFailure
from xlaserve.transport.http2.frames import ErrorCode
from xlaserve.transport.http2.headers import HeaderReader, HeaderWriter, encode_fields

PSEUDO = [(":method", "POST"), (":scheme", "http"), (":path", "/a"), (":authority", "b")]
LIMIT = 4096

VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF), max_size=300)


def literal(*fields: tuple[str, str]) -> bytes:
    """Write a block that neither reads nor writes the dynamic table."""
    return encode_fields(fields)


def test_a_block_that_leaves_the_table_alone_is_known_again() -> None:
    reader: HeaderReader[None] = HeaderReader(LIMIT)
    block = literal(*PSEUDO)
    head = reader.read(block)

    assert head is reader.seen(block)


def test_a_block_is_forgotten_when_the_table_changes() -> None:
    """Its indexed fields would mean something else then (RFC 7541, 2.3.2)."""
    encoder = Encoder()
    reader: HeaderReader[None] = HeaderReader(LIMIT)
    fields = [*PSEUDO, ("a", "1")]
    reader.read(encoder.encode(fields))
    indexed = encoder.encode(fields)
    reader.read(indexed)
    assert reader.seen(indexed)

    reader.read(encoder.encode([*PSEUDO, ("a", "2")]))

    assert reader.seen(indexed) is None
    assert dict(reader.read(indexed).fields)["a"] != "1"


def test_a_block_that_writes_the_table_is_read_each_time() -> None:
    encoder = Encoder()
    reader: HeaderReader[None] = HeaderReader(LIMIT)
    block = encoder.encode([*PSEUDO, ("a", "1")])
    reader.read(block)

    assert reader.seen(block) is None


def test_trailers_may_change_the_table_too() -> None:
    encoder = Encoder()
    reader: HeaderReader[None] = HeaderReader(LIMIT)
    block = literal(*PSEUDO)
    reader.read(block)
    assert reader.read_trailers(encoder.encode([("a", "1")])) is None

    assert reader.seen(block) is None


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (PSEUDO[1:], "without :method"),
        ([*PSEUDO[:2], (":path", "")], "without :method"),
        ([*PSEUDO, PSEUDO[0]], "there twice"),
        ([*PSEUDO, (":status", "200")], "unknown"),
        ([("a", "b"), *PSEUDO], "behind a header"),
        ([*PSEUDO, ("Upper", "b")], "lower case"),
        ([*PSEUDO, ("a b", "c")], "lower case"),
        ([*PSEUDO, ("", "c")], "lower case"),
        ([*PSEUDO, ("a", "b\r\nc")], "not allowed"),
        ([*PSEUDO, ("a", "b\0")], "not allowed"),
        ([*PSEUDO[:2], (":path", "/\n"), (":authority", "b")], "not allowed"),
        ([*PSEUDO, ("connection", "close")], "about the connection"),
        ([*PSEUDO, ("transfer-encoding", "chunked")], "about the connection"),
        ([*PSEUDO, ("te", "gzip")], "about the connection"),
        ([*PSEUDO, ("content-length", "-1")], "content-length"),
        ([*PSEUDO, ("content-length", "1"), ("content-length", "2")], "content-length"),
    ],
)
def test_a_malformed_request_says_why(fields: list[tuple[str, str]], problem: str) -> None:
    reader: HeaderReader[None] = HeaderReader(LIMIT)
    block = literal(*fields)

    assert problem in (reader.read(block).problem or "")
    assert reader.seen(block) is None


def test_a_list_over_the_limit_is_read_so_that_it_can_be_refused() -> None:
    reader: HeaderReader[None] = HeaderReader(LIMIT)

    assert reader.read(literal(*PSEUDO, ("a", "b" * LIMIT))).too_large
    assert not reader.read(literal(*PSEUDO, ("a", "b" * 100))).too_large


def test_a_list_far_over_the_limit_ends_the_connection() -> None:
    reader: HeaderReader[None] = HeaderReader(LIMIT)
    with pytest.raises(ConnectionFailure) as failure:
        reader.read(literal(*PSEUDO, ("a", "b" * LIMIT * 4)))

    assert ErrorCode.ENHANCE_YOUR_CALM is failure.value.code


@pytest.mark.parametrize("block", [b"\xff\xff\xff", b"\x00\x05ab", b"\x80", b"\x00\x01a", b"\xc0"])
def test_what_is_not_hpack_ends_the_connection(block: bytes) -> None:
    reader: HeaderReader[None] = HeaderReader(LIMIT)
    with pytest.raises(ConnectionFailure) as failure:
        reader.read(block)

    assert ErrorCode.COMPRESSION_ERROR is failure.value.code


@given(st.lists(st.tuples(st.sampled_from([":status", "a", "grpc-message", "x" * 200]), VALUES)))
def test_what_is_written_reads_the_same(fields: list[tuple[str, str]]) -> None:
    read = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in _decode(fields)]

    assert fields == read


def _decode(fields: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return list(Decoder(1 << 24).decode(HeaderWriter().write(fields), raw=True))
