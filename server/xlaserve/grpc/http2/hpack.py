"""HPACK decoder (RFC 7541).

Each block is decoded once, in a single loop. Most fields in a block reference earlier ones, which
are stored as validated objects with their size and the token that identifies kinds of requests.
An indexed field costs about 0.1 us, a literal four times as much.
"""

from typing import NoReturn

from xlaserve.grpc.http2 import huffman
from xlaserve.grpc.http2.dynamic_table import TABLE_BYTES, DynamicTable
from xlaserve.grpc.http2.header_fields import (
    CODED_NAMES,
    FIRST_DYNAMIC,
    FIRST_INDEXED_DYNAMIC,
    INDEXED,
    INDEXED_STATIC,
    NAMES,
    STATIC_NAMES,
    Field,
    coded_name,
    name_from,
    size_of,
)

_STRIDE = 2048
"""Bytes of a block decoded between two checks of the header list's size."""


class MalformedBlock(Exception):
    """A block cannot be decoded; the dynamic table is then invalid (RFC 7541 2.3.3, 4.2, 5)."""


class BlockTooLarge(Exception):
    """The decoded fields of a block exceed the size limit."""


class Decoder:
    """Decodes the blocks of one connection, in order; owns its dynamic table."""

    def __init__(self, max_list_bytes: int) -> None:
        self._max_list_bytes = max_list_bytes
        self.table = DynamicTable()
        self.list_bytes = 0
        """Total size of the last block's fields."""
        self.refers = False
        """Whether the last block referenced the dynamic table."""

    def decode(self, block: bytes) -> list[Field]:
        """Return the fields of a block.

        Raises MalformedBlock or BlockTooLarge; the dynamic table is invalid afterwards.
        """
        found: list[Field] = []
        self.list_bytes, self.refers = 0, False
        self.table.settle()
        position, end = 0, len(block)
        try:
            while position < end and self.list_bytes <= self._max_list_bytes:
                # Each field takes at least one octet, which bounds the fields between two checks.
                position = self._decode_part(block, position, min(end, position + _STRIDE), found)
        except (LookupError, MalformedBlock, huffman.MalformedHuffman) as error:
            if sum(map(size_of, found)) > self._max_list_bytes:
                raise BlockTooLarge from error
            raise MalformedBlock(str(error)) from error
        if position != end or self.list_bytes > self._max_list_bytes:
            self._refuse(found, position > end)
        return found

    def _refuse(self, found: list[Field], is_cut_off: bool) -> NoReturn:
        # In a truncated block, the last field is incomplete and does not count.
        if self.list_bytes - is_cut_off * size_of(found[-1]) > self._max_list_bytes:
            raise BlockTooLarge
        raise MalformedBlock("a truncated string")

    # The common cases are inlined for speed.
    def _decode_part(  # noqa: C901, PLR0912, PLR0915
        self, block: bytes, position: int, stop: int, found: list[Field]
    ) -> int:
        """Append the fields that begin before `stop`; return the position after them."""
        append, table = found.append, self.table.entries
        list_bytes, table_bytes = self.list_bytes, self.table.bytes
        changes, most_bytes = self.table.changes, self.table.max_bytes
        decode = huffman.decode
        while position < stop:
            octet = block[position]
            position += 1
            if octet >= INDEXED:
                if octet < FIRST_INDEXED_DYNAMIC:
                    field = INDEXED_STATIC[octet]
                else:
                    self.refers = True
                    index = octet - INDEXED
                    if octet == 0xFF:
                        index, position = integer(block, position, 0x7F)
                    field = table[index - FIRST_DYNAMIC]
                append(field)
                list_bytes += field[2]
                continue
            if octet >= 0x40:  # with incremental indexing (RFC 7541 6.2.1)
                most = 0x3F
            elif octet < 0x20:  # without indexing, or never indexed (RFC 7541 6.2.2, 6.2.3)
                most = 0x0F
            else:
                if found:
                    raise MalformedBlock("a table size update after a field")  # RFC 7541 4.2
                position = self._resize(block, position, octet & 0x1F)
                table_bytes, changes = self.table.bytes, self.table.changes
                most_bytes = self.table.max_bytes
                continue
            index = octet & most
            if not index:
                length = block[position]
                position += 1
                if length & 0x7F != 0x7F:
                    is_coded = length & 0x80
                    length &= 0x7F
                    octets = block[position : position + length]
                    position += length
                    if is_coded:
                        name = CODED_NAMES.get(octets) or coded_name(octets)
                    else:
                        name = NAMES.get(octets) or name_from(octets)
                else:
                    octets, position = long_string(block, position, length)
                    name = name_from(octets)
            elif index != most and index < FIRST_DYNAMIC:
                name = STATIC_NAMES[index]
            else:
                if index == most:
                    index = block[position]
                    position += 1
                    if index < 0x80:
                        index += most
                    else:
                        index, position = integer(block, position - 1, most)
                if index >= FIRST_DYNAMIC:
                    self.refers = True
                    name = table[index - FIRST_DYNAMIC][3]
                else:
                    name = STATIC_NAMES[index]
            length = block[position]
            position += 1
            if length < 0x7F:
                value = block[position : position + length]
                position += length
            elif length & 0x7F != 0x7F:
                length &= 0x7F
                value = decode(block[position : position + length])
                position += length
            else:
                value, position = long_string(block, position, length)
            token = name.token
            size = name.size + len(value)
            list_bytes += size
            if token is None or b"\0" in value or b"\n" in value or b"\r" in value:
                field = name.field(value)
            else:
                field = token, value, size, name
            append(field)
            if most == 0x3F:  # insert into the table, evicting the oldest (RFC 7541 4.4)
                table.insert(0, field)
                changes += 1
                table_bytes += size
                while table_bytes > most_bytes:
                    table_bytes -= table.pop()[2]
        self.list_bytes = list_bytes
        self.table.bytes, self.table.changes = table_bytes, changes
        return position

    def _resize(self, block: bytes, position: int, size: int) -> int:
        if size == 0x1F:
            size, position = integer(block, position, 0x1F)
        if size > TABLE_BYTES:
            # RFC 7541 6.3
            raise MalformedBlock(f"expected a table size up to {TABLE_BYTES} bytes, got {size}")
        self.table.resize(size)
        return position


_MAX_INTEGER_OCTETS = 5


def integer(block: bytes, position: int, number: int) -> tuple[int, int]:
    """Decode an integer longer than its prefix; return it and the position after it.

    `number` is the value of the prefix (RFC 7541 5.1).
    """
    for shift in range(0, 7 * _MAX_INTEGER_OCTETS, 7):
        octet = block[position]
        position += 1
        number += (octet & 0x7F) << shift
        if octet < 0x80:
            return number, position
    raise MalformedBlock("an integer that is too long")


def long_string(block: bytes, position: int, length: int) -> tuple[bytes, int]:
    """Decode a string that is long or Huffman-coded; return it and the position after it.

    If the block is truncated, the string is short and the position is past the end (RFC 7541 5.2).
    """
    is_coded = length >= 0x80
    length &= 0x7F
    if length == 0x7F:
        length, position = integer(block, position, length)
    octets = block[position : position + length]
    return huffman.decode(octets) if is_coded else octets, position + length
