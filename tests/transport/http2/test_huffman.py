"""Huffman strings: decoded or refused as by the hpack library."""

import os
from typing import Any

import pytest
from hpack.exceptions import HPACKDecodingError
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.huffman_table import decode_huffman
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xlaserve.grpc.http2 import huffman

_EXAMPLES = int(os.environ.get("HPACK_BLOCKS", "150"))
"""Number of strings and blocks that each comparison with the reference draws."""

encode = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode

TEXT = st.text(st.sampled_from("0123456789abcdef-/:=.,_ {}<>`~^$@\0"), max_size=90)
OCTETS = TEXT.map(str.encode) | st.binary(max_size=40)


def expected(data: bytes) -> bytes | None:
    """Return what the reference decodes; None if it refuses the string."""
    try:
        return decode_huffman(data)
    except HPACKDecodingError:
        return None


def found(data: bytes) -> bytes | None:
    try:
        return huffman.decode(data)
    except huffman.MalformedHuffman:
        return None


def test_the_code_follows_from_its_lengths() -> None:
    """The code is canonical, which is why zlib can decode it."""
    codes = huffman.canonical_codes(REQUEST_CODES_LENGTH)

    assert dict(enumerate(REQUEST_CODES)) == codes


@settings(max_examples=_EXAMPLES, deadline=None)
@given(OCTETS)
def test_what_was_encoded_is_decoded(octets: bytes) -> None:
    assert octets == huffman.decode(encode(octets))


@settings(max_examples=_EXAMPLES, deadline=None)
@given(OCTETS, st.integers(0, 1 << 16), st.integers(0, 7), st.binary(max_size=3))
def test_a_string_that_was_changed_ends_as_with_the_reference(
    octets: bytes, place: int, bit: int, more: bytes
) -> None:
    data = bytearray(encode(octets))
    if data:
        data[place % len(data)] ^= 1 << bit
    changed = bytes(data) + more

    assert expected(changed) == found(changed)


@settings(max_examples=_EXAMPLES, deadline=None)
@given(OCTETS, st.integers(0, 40))
def test_a_string_that_is_cut_off_ends_as_with_the_reference(octets: bytes, cut: int) -> None:
    data = encode(octets)[:-cut]

    assert expected(data) == found(data)


@settings(max_examples=_EXAMPLES, deadline=None)
@given(st.binary(max_size=60))
def test_any_octets_end_as_with_the_reference(data: bytes) -> None:
    assert expected(data) == found(data)


# Long enough for zlib, and short enough for the table.
@pytest.mark.parametrize("text", [b"0" * 8, b"0" * 80])
@pytest.mark.parametrize(
    "end",
    [
        b"",
        encode(b"&"),  # eight bits
        encode(b"a"),
        encode(b"<"),  # 15 bits, the longest code of text
        encode(b"\\"),  # 19 bits
        encode(b"\xff"),
        encode(b"\n"),  # 30 bits, as EOS
        b"\xff",  # eight bits of padding
        b"\xf8\xff",  # `&`, and eight bits of padding
        b"\x00",  # `0`, and three zeros
        b"\x1e",  # `a`, and a padding of 110
        b"\xff\xfb",  # `<` short of its last bit, which is a one that padding could be
        b"\xff\xff\xff\xff",  # EOS, and two bits
        b"\xff\xff\xff\xfc" + encode(b"a"),  # EOS within
        b"\xff\xfe",  # 15 ones and a zero
        b"\xff\xff\xea\xff",  # a symbol of 22 bits and more than padding
    ],
)
def test_the_ends_of_a_string_end_as_with_the_reference(text: bytes, end: bytes) -> None:
    """RFC 7541, 5.2: padding is up to seven ones, and EOS is not allowed."""
    data = encode(text) + end

    assert expected(data) == found(data)


def test_each_symbol_is_decoded_at_each_bit_of_an_octet() -> None:
    """By the table, and by zlib if it is a text symbol. `0` has five bits."""
    for zeros in (*range(8), *range(20, 28)):
        for symbol in range(256):
            octets = b"0" * zeros + bytes((symbol,))

            assert octets == huffman.decode(encode(octets))


def test_no_string_adds_to_the_table() -> None:
    """Counted: strings of rare symbols must not fill table rows, which would block the loop."""
    rows = {path: list(row) for path, row in huffman._Table().rows.items()}

    assert 257 == len(rows)
    assert {256} == set(map(len, rows.values()))


def test_a_string_of_rare_symbols_takes_one_step_an_octet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: each octet of the string is one table lookup."""
    table, steps = huffman._Table(), 0

    class Counting(list[Any]):
        def __getitem__(self, octet: Any) -> Any:
            nonlocal steps
            steps += 1
            return super().__getitem__(octet)

    counting = {id(row): Counting() for row in table.rows.values()}
    for row in table.rows.values():
        counting[id(row)] += [(symbols, counting[id(after)]) for symbols, after in row]
    table.padded = frozenset(id(counting[one]) for one in table.padded)
    table.start = counting[id(table.start)]
    monkeypatch.setattr(huffman, "_TABLE", table)
    octets = bytes(range(256)) * 4
    data = encode(octets)

    assert octets == huffman.decode(data)
    assert len(data) == steps


def test_text_is_left_to_zlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: the table decodes no text longer than its limit."""

    def refuse(data: bytes) -> bytes:
        raise AssertionError(data)

    monkeypatch.setattr(huffman, "_decode_by_table", refuse)
    for text in (
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "Bearer " + "aZ09-_" * 70,
    ):
        assert text.encode() == huffman.decode(encode(text.encode()))


# --- several strings at once ----------------------------------------------------------------

DAMAGED = st.builds(
    lambda octets, place, bit, more: _flipped(encode(octets), place, bit) + more,
    OCTETS,
    st.integers(0, 1 << 16),
    st.integers(0, 7),
    st.sampled_from([b"", b"\xff", b"\xff" * 4, huffman._MARK]),
)
MARKS = [b"09,", b"=9,", b"E9,", b"Uo(", b"wa'", b"&a'", b"X1#", b"!a'"]

PIECES = [huffman._MARK, encode(b"0\0"), encode(b"\xff"), b"\xff" * 2, b"\xff\xff\xb1", b"\x07"]
"""A NUL, the end of a DEFLATE block, and the bits that make up the mark."""


def _flipped(data: bytes, place: int, bit: int) -> bytes:
    octets = bytearray(data)
    if octets:
        octets[place % len(octets)] ^= 1 << bit
    return bytes(octets)


def all_of(strings: list[bytes]) -> list[bytes] | None:
    """Decode several strings together; None if they must be decoded one by one."""
    decoded = huffman.decode_marked(strings)
    if decoded is None:
        return None
    found, size = decoded
    assert size == sum(map(len, found)) - len(found) * huffman.MARK_BYTES
    return [octets[: -huffman.MARK_BYTES] for octets in found]


@settings(max_examples=_EXAMPLES, deadline=None)
@given(
    st.lists(
        OCTETS.map(encode)
        | TEXT.map(str.encode).map(encode)
        | st.tuples(TEXT, st.sampled_from(MARKS)).map(lambda two: encode(two[0].encode() + two[1]))
        | DAMAGED
        | st.lists(st.sampled_from(PIECES), max_size=4).map(b"".join)
        | st.binary(max_size=20),
        min_size=1,
        max_size=5,
    )
)
@example([huffman._MARK, b"\xff\xff\xb1"])  # one NUL too many, and one that is not read
@example([b"", huffman._MARK, b"\xff\xff\xff\xff"])
def test_strings_are_decoded_at_once_as_one_by_one(strings: list[bytes]) -> None:
    """Or refused together: when one is malformed, has a NUL, or has a symbol that is not text."""
    each = [expected(string) for string in strings]
    is_text = all(
        octets is not None
        and max((REQUEST_CODES_LENGTH[one] for one in octets or b"0"), default=0) <= 15
        and b"\0" not in octets
        for octets in each
    )

    assert (each if is_text else None) == all_of(strings)
    # Earlier strings have no effect on later ones.
    assert [b"next", b"0"] == all_of([encode(b"next"), encode(b"0")])


def test_strings_of_text_are_left_to_zlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tested with every padding, and with a symbol of the mark in front of it."""
    strings = [b"0" * count + mark for mark in MARKS for count in range(8)]
    coded = list(map(encode, strings))
    monkeypatch.delattr(huffman, "decode")

    assert strings == all_of(coded)


def test_the_mark_synchronises_from_whatever_bits() -> None:
    """After the mark all bits form symbols, the last of them NUL; padding alone yields the marks.

    Other bits yield other symbols before NUL, or one NUL more.
    """
    longest = 15
    codes = {
        f"{code:0{REQUEST_CODES_LENGTH[symbol]}b}": symbol
        for symbol, code in enumerate(REQUEST_CODES[:256])
        if REQUEST_CODES_LENGTH[symbol] <= longest
    }
    bits = "".join(f"{octet:08b}" for octet in huffman._MARK)
    states = {code[:count] for code in codes for count in range(len(code))} | {"1" * 14}
    symbols = {}
    for state in states:
        path, given_ = state, bytearray()
        for bit in bits:
            path += bit
            assert path != "1" * longest  # which terminates the zlib stream
            if path in codes:
                given_.append(codes[path])
                path = ""
        assert "" == path
        symbols[state] = bytes(given_)
    padding = ["1" * count for count in range(8)]

    assert [mark + b"\0" for mark in MARKS] == [symbols[state] for state in padding]
    assert all(
        octets.endswith(b"\0") and (octets.count(0) > 1 or octets[-4:-1] not in MARKS)
        for state, octets in symbols.items()
        if state not in padding
    )
