"""Header blocks decoded or refused as by the hpack library, with the same dynamic table."""

import os

import hpack
import pytest
from hpack.table import HeaderTable
from hypothesis import given, settings
from hypothesis import strategies as st
from support.frames import integer
from support.hpack_pair import LayoutPair, Lines, Pair, string

from xlaserve.grpc.http2.header_fields import STATIC
from xlaserve.grpc.http2.hpack import BlockTooLarge, Decoder

_EXAMPLES = int(os.environ.get("HPACK_BLOCKS", "150"))
"""Number of strings and blocks that each comparison with the reference draws."""
LIMIT = 1 << 10

NAMES = st.sampled_from(
    [b":method", b":path", b"grpc-timeout", b"traceparent", b"te", b"X", b"", b"a" * 130]
)
VALUES = st.sampled_from(
    [b"", b"trailers", b"a\nb", b"\xc3\xa4", b"v" * 127, b"w" * 700]
) | st.text(st.sampled_from("0123456789abcdef-"), max_size=60).map(str.encode)
PREFIXES = st.sampled_from([(0x40, 6), (0x00, 4), (0x10, 4)])
INDEXES = st.integers(1, 70) | st.sampled_from([61, 62, 63, 126, 127, 128, 200, 1 << 20])


@st.composite
def representations(draw: st.DrawFn) -> bytes:
    """Encode a field in one of the representations of RFC 7541, 6."""
    way = draw(st.sampled_from(["indexed", "named", "literal", "size"]))
    if way == "indexed":
        return integer(draw(INDEXES), 7, 0x80)
    if way == "size":
        return integer(draw(st.sampled_from([0, 31, 64, 200, 4095, 4096, 4097])), 5, 0x20)
    first, bits = draw(PREFIXES)
    if way == "named":
        name = integer(draw(INDEXES), bits, first)
    else:
        name = bytes((first,)) + string(draw(NAMES), draw(st.booleans()))
    return name + string(draw(VALUES), draw(st.booleans()))


BLOCKS = st.lists(representations(), max_size=12).map(b"".join)


@settings(max_examples=_EXAMPLES, deadline=None)
@given(st.lists(BLOCKS, max_size=8))
def test_blocks_end_as_with_the_reference(blocks: list[bytes]) -> None:
    Pair().compare(*blocks)


@settings(max_examples=_EXAMPLES, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(NAMES, VALUES), max_size=8).map(
            lambda fields: [(name, value, False) for name, value in fields]
        ),
        max_size=8,
    ),
    st.booleans(),
)
def test_what_the_reference_encodes_is_decoded(
    lists: list[list[tuple[bytes, bytes, bool]]], coded: bool
) -> None:
    encoder, pair = hpack.Encoder(), Pair(1 << 16)
    for fields in lists:
        outcome = pair.compare(encoder.encode(fields, huffman=coded))

        assert [[(name, value) for name, value, _ in fields]] == outcome


@settings(max_examples=_EXAMPLES, deadline=None)
@given(BLOCKS, st.integers(0, 1 << 16), st.integers(0, 255), st.integers(0, 1 << 16))
def test_a_block_that_was_changed_ends_as_with_the_reference(
    block: bytes, place: int, octet: int, cut: int
) -> None:
    changed = bytearray(block)
    if block:
        changed[place % len(block)] = octet
        del changed[cut % len(block) + 1 :]

    Pair().compare(bytes(changed))


@settings(max_examples=_EXAMPLES, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=3))
def test_any_octets_end_as_with_the_reference(blocks: list[bytes]) -> None:
    Pair().compare(*blocks)


FIELDS = st.tuples(
    st.sampled_from([b":path", b"te", b"a", b"traceparent", b"x-id", b"authorization"]),
    st.sampled_from([b"1", b"2", b"trailers", b"v" * 300])
    | st.integers(0, 1 << 30).map(lambda number: b"%030d" % number),
)


@settings(max_examples=max(20, _EXAMPLES // 10), deadline=None)
@given(
    st.lists(FIELDS, max_size=6),
    st.lists(st.lists(FIELDS, max_size=4), min_size=1, max_size=60),
    st.booleans(),
)
def test_blocks_that_begin_alike_are_read_as_by_the_reference(
    constant: Lines, varying: list[Lines], coded: bool
) -> None:
    """Inserted entries shift the references of the next block; evictions invalidate them."""
    encoder, pair = hpack.Encoder(), LayoutPair()
    for more in varying:
        fields = [(b":method", b"POST"), *constant, *more]

        assert [fields] == pair.compare(encoder.encode(fields, huffman=coded))


@pytest.mark.parametrize("added", [1, 2, 63, 64, 65, 100])
@pytest.mark.parametrize("references", [b"\x83\x86", b"\xbe\x83", b"\x83\xc1\xbe"])
def test_references_move_by_what_was_added(references: bytes, added: int) -> None:
    pair = Pair(1 << 16)
    pair.compare(*[b"\x40\x01" + bytes((97 + number,)) + b"\x01b" for number in range(4)])
    pair.compare(references + b"\x40\x01n\x01v" * added)
    for moved in range(0xC2, 0xFF):
        pair.compare(references, b"\x83" + bytes((moved,)))
    # The entries that the same references meant before are evicted or shifted.
    pair.compare(b"\x20\x3f\xe1\x1f")

    assert ["malformed"] == pair.compare(b"\x83\xbe")


def test_a_reference_ends_with_its_entry() -> None:
    """The same first fields, one index further, but the oldest of them was evicted (4.4)."""
    pair = Pair(1 << 16)
    pair.compare(*[b"\x40\x01a" + string(b"v" * 1300, False) for _ in range(3)])
    pair.compare(b"\x83\xc0\x40\x01b" + string(b"v" * 1300, False))

    assert ["malformed"] == pair.compare(b"\x83\xc1")


# # --- single rules
# --------------------------------------------------------------------------------

ENTRY = b"\x40" + string(b"a", False) + string(b"b", False)


def test_the_static_table_is_that_of_the_rfc() -> None:
    """RFC 7541, Appendix A."""
    table = HeaderTable.STATIC_TABLE

    assert list(table) == [(name.octets, value) for _, value, _, name in STATIC]


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (b"\x80", "index 0 (6.1)"),
        (b"\xbe", "an index behind the table (2.3.3)"),
        (b"\xff\x00", "the same with two octets"),
        (b"\x7f\x00\x01a", "the index of a name behind the table"),
        (b"\x82\x20", "a change of size behind a field (4.2)"),
        (b"\x3f\xe2\x1f", "a table of 4097 bytes (6.3)"),
        (b"\xff\xff\xff\xff\xff\xff\x01", "a number too long (5.1)"),
        (b"\xff\x80\x80\x80\x80\x80\x00", "a number that only is written too long"),
        (b"\xff", "a number that is cut off"),
        (b"\x40", "a name that is cut off"),
        (b"\x40\x02a", "a name with an octet too few"),
        (b"\x40\x01a", "no value"),
        (b"\x40\x01a\x02b", "a value with an octet too few"),
        (b"\x40\x01a\x81\x00", "padding of zeros (5.2)"),
        (b"\x00\x84\xff\xff\xff\xff\x00", "EOS in a name"),
    ],
)
def test_a_malformed_block_is_refused(block: bytes, why: str) -> None:
    assert ["malformed"] == Pair().compare(block), why


def test_an_entry_larger_than_the_table_empties_it() -> None:
    """RFC 7541, 4.4: this is not an error."""
    pair = Pair(1 << 16)
    pair.compare(ENTRY, b"\x40" + string(b"a", False) + string(b"v" * 4096, False))

    assert [[], []] == pair.tables()[0]
    assert ["malformed"] == pair.compare(b"\xbe")


def test_entries_leave_from_the_oldest_on() -> None:
    pair = Pair(1 << 16)
    for number in range(200):
        pair.compare(b"\x40" + string(b"name", False) + string(b"%d" % number, False))
    (ours, _), (size, _) = pair.tables()

    assert size <= 4096
    assert (b"name", b"199") == ours[0]
    assert [[(b"name", b"199")]] == pair.compare(b"\xbe")


def test_a_smaller_table_drops_what_has_no_place() -> None:
    pair = Pair()
    pair.compare(ENTRY, ENTRY, b"\x3f\x04")  # 35 bytes: one entry of 34

    assert [(b"a", b"b")] == pair.tables()[0][0]
    pair.compare(b"\x20\x3f\xe1\x1f", b"\x82")  # to 0, and to 4096 again

    assert [] == pair.tables()[0][0]


def test_a_list_over_the_limit_is_too_large_whatever_follows() -> None:
    field = b"\x00" + string(b"a", False) + string(b"v" * 967, False)

    assert [[(b"a", b"v" * 967)]] == Pair(1000).compare(field)
    for more in (b"\x82", b"\x82\x80"):
        assert ["too large"] == Pair(1000).compare(field + more)
    # A malformed field before the limit is reported as malformed.
    assert ["malformed"] == Pair(1000).compare(field + b"\x80" + b"\x82")
    assert ["malformed"] == Pair(1000).compare(field + b"\x40\x05a")


def test_a_long_block_of_short_references_is_not_decoded_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each octet may stand for an entry of 4 KB; decoded bytes are counted, not timed."""
    decoder = Decoder(1 << 16)
    decoder.decode(b"\x40" + string(b"a", False) + string(b"v" * 4000, False))
    parts = []
    decode_part = Decoder._decode_part

    def count(self: Decoder, block: bytes, position: int, stop: int, found: list[object]) -> int:
        parts.append(stop - position)
        return decode_part(self, block, position, stop, found)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "_decode_part", count)
    with pytest.raises(BlockTooLarge):
        decoder.decode(b"\xbe" * (1 << 16))

    assert [2048] == parts


def test_changes_of_the_table_are_counted() -> None:
    """Cached blocks may be invalid after a change."""
    decoder = Decoder(LIMIT)
    decoder.decode(b"\x82\x00" + string(b"a", False) + string(b"b", False))

    assert not decoder.table.changes
    for block in (ENTRY, b"\x20", b"\x3f\xe1\x1f"):
        before = decoder.table.changes
        decoder.decode(block)

        assert before < decoder.table.changes
