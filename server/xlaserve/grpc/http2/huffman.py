"""Decoder of HPACK's Huffman code, which uses zlib (RFC 7541 5.2 and Appendix B).

Like the codes of DEFLATE, HPACK's code is canonical: the code lengths define it (RFC 1951 3.2.2).
Text consists of symbols with codes of at most 15 bits; all longer codes begin with 15 one bits. If
those 15 ones are declared to be DEFLATE's end-of-block code, the result is a valid DEFLATE code,
which zlib decodes at 4 ns per byte. Strings with a longer code, and strings too short to be worth
a call of zlib, are decoded by a table.
"""

import zlib
from collections.abc import Sequence
from operator import itemgetter
from typing import Final, TypeAlias

_LENGTHS: Final = bytes.fromhex(
    "0d 17 1c 1c 1c 1c 1c 1c 1c 18 1e 1c 1c 1e 1c 1c 1c 1c 1c 1c 1c 1c 1e 1c 1c 1c 1c 1c 1c 1c "
    "1c 1c 06 0a 0a 0c 0d 06 08 0b 0a 0a 08 0b 08 06 06 06 05 05 05 06 06 06 06 06 06 06 07 08 "
    "0f 06 0c 0a 0d 06 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 08 07 "
    "08 0d 13 0d 0e 06 0f 05 06 05 06 05 06 06 06 05 07 07 06 06 06 05 06 07 06 05 05 06 07 07 "
    "07 07 07 0f 0b 0e 0d 1c 14 16 14 14 16 16 16 17 16 17 17 17 17 17 18 17 18 18 16 17 18 17 "
    "17 17 17 15 16 17 16 17 17 18 16 15 14 16 16 17 17 15 17 16 16 18 15 16 17 17 15 15 16 15 "
    "17 16 17 17 14 16 16 16 17 16 16 17 1a 1a 14 13 16 17 16 19 1a 1a 1a 1b 1b 1a 18 19 13 15 "
    "1a 1b 1b 1a 1b 18 15 15 1a 1a 1c 1b 1b 1b 14 18 14 15 16 15 15 17 16 16 19 19 18 18 1a 17 "
    "1a 1b 1a 1a 1b 1b 1b 1b 1b 1c 1b 1b 1b 1b 1b 1a 1e"
)
"""Code length of each symbol in bits; the last symbol is EOS."""
_EOS = 256
_MAX_DEFLATE_BITS = 15
_TABLE_BYTES = 12
"""For strings up to this length, the table is faster than a call of zlib."""


class MalformedHuffman(Exception):
    """A string contains EOS, or its padding is not zero to seven one bits (RFC 7541 5.2)."""


def decode(data: bytes) -> bytes:
    """Decode a Huffman-coded string. Raises MalformedHuffman."""
    if len(data) > _TABLE_BYTES:
        inflater = _INFLATER.copy()
        # A code has at least five bits, so the output is less than twice the input. Without a
        # limit zlib would allocate a buffer of 16 KB.
        octets = inflater.decompress(data.translate(_REVERSED) + _BLOCK_END, 2 * len(data))
        if inflater.eof:
            # A code longer than 15 bits ends the block within `data`; otherwise `_BLOCK_END` ends
            # it. One octet is left over after seven bits of padding, which are valid, or after
            # eight, which are not.
            unused = len(inflater.unused_data)
            if not unused or (unused == 1 and (data[-1] != 0xFF or _padding(data, octets) == 7)):
                return octets
    return _decode_by_table(data)


def decode_marked(strings: Sequence[bytes]) -> tuple[list[bytes], int] | None:
    """Decode several strings in one call of zlib; return them and their total length.

    Each decoded string is still followed by a mark of `MARK_BYTES` octets, which the total does
    not include: most strings are never used, so slicing all of them would waste time.
    Return None if a string is malformed or has a symbol with a code of more than 15 bits.
    """
    data = (_MARK.join(strings) + _MARK).translate(_REVERSED)
    # After the last mark zlib is at a symbol boundary, ready for the strings of the next call.
    inflater = _INFLATERS[0]
    try:
        octets = inflater.decompress(data, 2 * len(data))
    except BaseException:
        _INFLATERS[0] = _INFLATER.copy()  # after an error the inflater's state is unknown
        raise
    if inflater.eof:
        # A longer code ended the block, so a NUL within a string could pass for a missing mark.
        _INFLATERS[0] = _INFLATER.copy()
        return None
    found = octets.split(b"\0")
    found.pop()
    count = len(found)
    if count != len(strings) or not _MARKS.issuperset(map(_mark_of, found)):
        return None
    return found, len(octets) - count * (MARK_BYTES + 1)


def _padding(data: bytes, octets: bytes) -> int:
    """Return the number of padding bits in a string, from its decoded octets."""
    return 8 * len(data) - sum(octets.translate(_LENGTHS[:_EOS]))


def canonical_codes(lengths: Sequence[int]) -> dict[int, int]:
    """Return the canonical Huffman code for code lengths, as a map from symbols to codes.

    Symbols of length 0 have no code.
    """
    codes, code = {}, 0
    for length in range(1, max(lengths) + 1):
        for symbol, bits in enumerate(lengths):
            if bits == length:
                codes[symbol] = code
                code += 1
        code <<= 1
    return codes


# --- decoding with zlib ------------------------------------------------------------------------

_REVERSED = bytes(int(f"{octet:08b}"[::-1], 2) for octet in range(256))
"""Reverses the bits of an octet: HPACK starts with the highest bit, DEFLATE with the lowest."""
_BLOCK_END = b"\xff\x7f"
"""15 one bits, which are the end-of-block code, and a zero bit. The zero prevents a truncated last
code from taking one of the ones: then fewer than 15 would follow it, and the block would not end.
"""

_MARK = bytes.fromhex("03ff5ff8")
"""Separates strings that are decoded together: the bits 0000001111111111010 and the code of NUL.

The first 19 bits resynchronise the decoder: wherever within a symbol they start, they end at a
symbol boundary, so NUL is decoded after every string. If the output has as many NULs as there are
strings, each NUL ends one string. The three symbols before it are the 19 bits and the string's
padding; they are in `_MARKS` exactly if the padding is zero to seven ones, that is, valid.
"""
_MARKS = frozenset((b"09,", b"=9,", b"E9,", b"Uo(", b"wa'", b"&a'", b"X1#", b"!a'"))
"""The three symbols decoded from a mark after zero to seven bits of padding."""
MARK_BYTES = 3
_mark_of = itemgetter(slice(-MARK_BYTES, None))


class _BitWriter:
    """Writes the bits of a DEFLATE block header (RFC 1951 3.2.7)."""

    def __init__(self) -> None:
        self.bits: list[int] = []

    def number(self, value: int, count: int) -> None:
        self.bits += (value >> bit & 1 for bit in range(count))

    def code(self, value: int, count: int) -> None:
        self.bits += (value >> bit & 1 for bit in reversed(range(count)))

    def octets(self) -> bytes:
        assert not len(self.bits) % 8
        whole = int("".join(map(str, reversed(self.bits))), 2)
        return whole.to_bytes(len(self.bits) // 8, "little")


_ORDER = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15)
"""Order of the code lengths of the code length alphabet (RFC 1951 3.2.7)."""


def _block_header() -> bytes:
    """Return the header of a final DEFLATE block that uses the codes of HPACK."""
    # End-of-block gets the one code of 15 bits that is left; one unused distance code follows.
    lengths = [bits if bits <= _MAX_DEFLATE_BITS else 0 for bits in _LENGTHS[:_EOS]]
    lengths += [_MAX_DEFLATE_BITS, 1]
    used = sorted(set(lengths))
    # Encode the lengths with codes of 3 and 4 bits; choose how many of each, so that the code is
    # complete (no bit pattern is unused).
    short = 16 - len(used)
    bits_of = {length: 3 if index < short else 4 for index, length in enumerate(used)}
    codes = canonical_codes([bits_of.get(length, 0) for length in range(len(_ORDER))])
    writer = _BitWriter()
    for _ in range(2):  # empty blocks of 10 bits, so that the data begins with an octet
        writer.number(0b010, 3)
        writer.number(0, 7)
    writer.number(0b101, 3)
    for value, count in ((0, 5), (0, 5), (len(_ORDER) - 4, 4)):
        writer.number(value, count)
    for length in _ORDER:
        writer.number(bits_of.get(length, 0), 3)
    for length in lengths:
        writer.code(codes[length], bits_of[length])
    return writer.octets()


_INFLATER = zlib.decompressobj(wbits=-9)
"""An inflater that has read the block header; each string is decoded by a copy of it."""
_INFLATER.decompress(_block_header())
_INFLATERS = [_INFLATER.copy()]
"""Holds the inflater of `decode_marked`, which is reused for all calls: copying one takes as long
as decoding about a hundred octets. Its block never ends, and earlier input does not affect it."""

# --- decoding with a table ---------------------------------------------------------------------

_BEHIND_EOS = "EOS"
"""The state after EOS: the string is malformed."""
_MAX_PADDING_BITS = 7

_Row: TypeAlias = "list[tuple[bytes, _Row]]"
"""The transitions of a state: for each octet, the decoded symbols and the next state. A state is an
inner node of the code tree, reached by the bits since the last complete symbol."""


class _Table:
    """The transitions of all states, computed when the module is imported.

    This takes 6 MB and about 14 ms. Computing rows on demand would be cheaper for most servers,
    but the first string with many rare symbols would need all of them and block the event loop
    for longer than a turn.
    """

    def __init__(self) -> None:
        leaves = {
            f"{code:0{_LENGTHS[symbol]}b}": symbol
            for symbol, code in canonical_codes(_LENGTHS).items()
        }
        self.rows: dict[str, _Row] = {"": [], _BEHIND_EOS: []}
        """The row of each state, keyed by the state's bits."""
        for path in leaves:
            for end in range(1, len(path)):
                self.rows.setdefault(path[:end], [])
        halves = {
            path: [_walk(leaves, path, f"{half:04b}") for half in range(16)] for path in self.rows
        }
        linked = {
            path: [(symbols, self.rows[after]) for symbols, after in walked]
            for path, walked in halves.items()
        }
        for path, row in self.rows.items():
            for symbols, between in halves[path]:
                behind = linked[between]
                if symbols:
                    behind = [(symbols + more, after) for more, after in behind]
                row.extend(behind)
        self.start = self.rows[""]
        padded = [self.rows["1" * ones] for ones in range(_MAX_PADDING_BITS + 1)]
        self.padded = frozenset(map(id, padded))
        """`id` of the rows of the states in which a string may end: valid padding."""


def _walk(leaves: dict[str, int], path: str, bits: str) -> tuple[bytes, str]:
    """Follow bits from a path in the code tree; return the decoded symbols and the new path."""
    symbols = bytearray()
    for bit in bits if path != _BEHIND_EOS else "":
        path += bit
        symbol = leaves.get(path)
        if symbol == _EOS:
            path = _BEHIND_EOS
            break
        if symbol is not None:
            symbols.append(symbol)
            path = ""
    return bytes(symbols), path


_TABLE = _Table()


def _decode_by_table(data: bytes) -> bytes:
    row = _TABLE.start
    found: list[bytes] = []
    for octet in data:
        symbols, row = row[octet]
        if symbols:  # often empty: three of four octets of rare symbols complete no symbol
            found.append(symbols)
    if id(row) not in _TABLE.padded:
        raise MalformedHuffman
    return b"".join(found)
