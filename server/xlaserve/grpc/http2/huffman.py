"""Strings in the Huffman code of HPACK, decoded (RFC 7541, 5.2 and Appendix B).

The code is canonical, as those of DEFLATE are (RFC 1951, 3.2.2): the lengths of its codes say all.
Text is made of symbols of up to 15 bits, and all longer ones begin with 15 ones. With that prefix
as the code that ends a block, the code is one of DEFLATE, and zlib decodes it at 4 ns a byte. A
string with a longer symbol, or so short that a call of zlib takes longer, is decoded by a table.
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
"""Bits of the code of each symbol; the last symbol is EOS."""
_EOS = 256
_MAX_DEFLATE_BITS = 15
_TABLE_BYTES = 12
"""Up to this many bytes the table is quicker than a call of zlib."""


class MalformedHuffman(Exception):
    """A string has EOS in it, or ends in anything but up to seven ones (RFC 7541, 5.2)."""


def decode(data: bytes) -> bytes:
    """Return the octets that a string stands for. Raises MalformedHuffman."""
    if len(data) > _TABLE_BYTES:
        inflater = _INFLATER.copy()
        # No symbol has less than five bits; a limit spares zlib a buffer of 16 KB.
        octets = inflater.decompress(data.translate(_REVERSED) + _BLOCK_END, 2 * len(data))
        if inflater.eof:
            # The block has ended within `data` where a symbol is longer, and behind it else.
            unused = len(inflater.unused_data)
            # Of seven or eight bits of padding one octet is left; of eight if all its bits are.
            if not unused or (unused == 1 and (data[-1] != 0xFF or _padding(data, octets) == 7)):
                return octets
    return _decode_by_table(data)


def decode_marked(strings: Sequence[bytes]) -> tuple[list[bytes], int] | None:
    """Return the octets of each of some strings, and how many these are together.

    In one go; None where not all of it is text, or one of them is malformed. Each has the
    `MARK_BYTES` of a mark after it, which are not counted: most are never asked for.
    """
    data = (_MARK.join(strings) + _MARK).translate(_REVERSED)
    # Every mark leaves zlib between two symbols: it goes on there with the strings of others.
    inflater = _INFLATERS[0]
    try:
        octets = inflater.decompress(data, 2 * len(data))
    except BaseException:
        _INFLATERS[0] = _INFLATER.copy()  # it may be anywhere
        raise
    if inflater.eof:
        # A longer symbol ends the block: a NUL of a string may stand for that of a mark after it.
        _INFLATERS[0] = _INFLATER.copy()
        return None
    found = octets.split(b"\0")
    found.pop()
    count = len(found)
    if count != len(strings) or not _MARKS.issuperset(map(_mark_of, found)):
        return None
    return found, len(octets) - count * (MARK_BYTES + 1)


def _padding(data: bytes, octets: bytes) -> int:
    """Return how many bits of a string are after the last of its symbols."""
    return 8 * len(data) - sum(octets.translate(_LENGTHS[:_EOS]))


def canonical_codes(lengths: Sequence[int]) -> dict[int, int]:
    """Return the code of each symbol that has one: in order of length, then of the symbols."""
    codes, code = {}, 0
    for length in range(1, max(lengths) + 1):
        for symbol, bits in enumerate(lengths):
            if bits == length:
                codes[symbol] = code
                code += 1
        code <<= 1
    return codes


# --- by zlib -----------------------------------------------------------------------------------

_REVERSED = bytes(int(f"{octet:08b}"[::-1], 2) for octet in range(256))
"""HPACK fills an octet from its highest bit on, DEFLATE from its lowest."""
_BLOCK_END = b"\xff\x7f"
"""15 ones and a zero. With the padding before it, the first 15 ones end the block. The zero keeps a
code from ending it that lacks its last bit: 15 ones behind that bit are not there."""

_MARK = bytes.fromhex("03ff5ff8")
"""Separates strings that are decoded in one go: 0000001111111111010, and the code of NUL.

The first 19 bits synchronise: from whatever bits of a symbol they follow, they end with one. So NUL
is found behind every string that is read. If all are read, and there are no more of them, each is
the end of one string; and the three symbols before it are those that the bits make of padding, of
up to seven ones, and of nothing else: before these is all of a string that is not malformed.
"""
_MARKS = frozenset((b"09,", b"=9,", b"E9,", b"Uo(", b"wa'", b"&a'", b"X1#", b"!a'"))
"""These symbols, by the ones of padding: none to seven."""
MARK_BYTES = 3
_mark_of = itemgetter(slice(-MARK_BYTES, None))


class _BitWriter:
    """Writes what zlib reads before the data of a block (RFC 1951, 3.2.7)."""

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
"""In which order the lengths of the codes for lengths come."""


def _block_header() -> bytes:
    """Return the beginning of a last block whose codes are those of HPACK."""
    # The symbol that ends a block has the code which is left; then, without use, one distance.
    lengths = [bits if bits <= _MAX_DEFLATE_BITS else 0 for bits in _LENGTHS[:_EOS]]
    lengths += [_MAX_DEFLATE_BITS, 1]
    used = sorted(set(lengths))
    # The codes for these lengths have 3 or 4 bits, as many of 3 as make them complete.
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
"""Has read the header of a block; a copy of it decodes a string."""
_INFLATER.decompress(_block_header())
_INFLATERS = [_INFLATER.copy()]
"""The one that decodes the strings of all blocks, and is not copied: a copy takes as long as some
hundred octets. The block that it reads has no end, and what it has read no effect."""

# --- by a table --------------------------------------------------------------------------------

_BEHIND_EOS = "EOS"
"""The path to where a string is malformed, whatever follows."""
_MAX_PADDING_BITS = 7

_Row: TypeAlias = "list[tuple[bytes, _Row]]"
"""The transitions of a state by octets: the symbols that one completes, and the next state. A state
is a node of the tree of codes: the bits since the last symbol."""


class _Table:
    """The transitions of all states: complete from the start, so that no string adds to it.

    It takes 6 MB, and some 14 ms when the module is imported. Rows that are made as strings need
    them take less of most servers; but the first string of many rare symbols needs all of them,
    and holds all connections for more than a turn.
    """

    def __init__(self) -> None:
        leaves = {
            f"{code:0{_LENGTHS[symbol]}b}": symbol
            for symbol, code in canonical_codes(_LENGTHS).items()
        }
        self.rows: dict[str, _Row] = {"": [], _BEHIND_EOS: []}
        """The row of each state, by its bits."""
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
        """The states that a string may end in, by their identities."""


def _walk(leaves: dict[str, int], path: str, bits: str) -> tuple[bytes, str]:
    """Return the symbols that some bits after a path complete, and the path they lead to."""
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
        if symbols:  # three of four octets of rare symbols complete none
            found.append(symbols)
    if id(row) not in _TABLE.padded:
        raise MalformedHuffman
    return b"".join(found)
