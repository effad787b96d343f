"""Fast decoding of header blocks that differ from an earlier one only in values (RFC 7541).

A client encodes the headers of its requests in the same way each time: indexed fields, then
literals with the same names. The layout of such a block is everything except the values of these
literals. A block that matches a known layout has only its values decoded, in a quarter of the time
that decoding the whole block takes.

This fast path never rejects a block: one that does not match, or has any error, goes to `Decoder`,
and the dynamic table is unchanged.
"""

from collections.abc import Sequence
from typing import Generic

from xlaserve.grpc.http2 import huffman
from xlaserve.grpc.http2.dynamic_table import BlockValues
from xlaserve.grpc.http2.header_fields import FIRST_INDEXED_DYNAMIC, INDEXED_STATIC, Field, size_of
from xlaserve.grpc.http2.hpack import Decoder, MalformedBlock, integer
from xlaserve.grpc.http2.layout import K, Layout, layout_of

_MOVED = tuple(
    bytes(
        octet + added if FIRST_INDEXED_DYNAMIC <= octet < 0xFF - added else octet
        for octet in range(0x100)
    )
    for added in range(0xFF - FIRST_INDEXED_DYNAMIC)
)
"""Translation tables that shift indexed references by the number of inserted entries."""


def _decoded(layout: Layout[K], block: bytes, strings: list[bytes]) -> bool:
    """Decode the Huffman-coded ones among `strings` in place; false if `decode_marked` cannot."""
    position, coded = layout.start, []
    for step, (_, size) in enumerate(layout.steps):
        position += size
        length = block[position]
        position += 1
        if length >= 0x80:
            coded.append(step)
        if length & 0x7F == 0x7F:
            _, position = integer(block, position, 0x7F)
        position += len(strings[step])
    decoded = huffman.decode_marked([strings[step] for step in coded])
    if decoded is None:
        return False
    for step, string in zip(coded, decoded[0], strict=True):
        strings[step] = string[: -huffman.MARK_BYTES]
    return True


class Layouts(Generic[K]):
    """Decodes the blocks of one connection that match one of its two known layouts.

    There are two because a client that inserts entries has to send evicted fields again every few
    requests, and these blocks have a second layout.
    """

    def __init__(self, decoder: Decoder, max_bytes: int) -> None:
        self._decoder = decoder
        self._table = decoder.table
        self._max_bytes = max_bytes
        self.layout: Layout[K] | None = None
        """The layout of the last block."""
        self._other: Layout[K] | None = None
        self._misses = 0
        """Number of blocks that matched neither layout."""
        self._in_a_row = 0
        """Number of consecutive blocks that matched neither layout."""

    def read(self, block: bytes) -> BlockValues | None:
        """Return the values of a block's fields, and insert its entries into the dynamic table.

        Return None, with the table unchanged, if `Decoder` has to decode the block.
        """
        values = self._read(block)
        if values is None and self._other is not None:
            self.layout, self._other = self._other, self.layout
            values = self._read(block)
        return values

    # Long because it is inlined for speed: every block passes through here.
    def _read(self, block: bytes) -> BlockValues | None:  # noqa: C901, PLR0911, PLR0912
        layout = self.layout
        if layout is None:
            return None
        position = layout.start
        if layout.known_at == self._table.changes:
            if layout.left_bytes < 0 or block[:position] != layout.references:
                return None
        elif not block.startswith(layout.steps[0][0], position) or not self._renew(block):
            return None
        strings, coded = [], 0
        try:
            for opener, size in layout.steps:
                end = position + size
                if block[position:end] != opener:
                    return None
                length = block[end]
                position = end + 1
                if length >= 0x80:
                    coded += 1
                    length -= 0x80
                if length == 0x7F:
                    length, position = integer(block, position, length)
                end = position + length
                strings.append(block[position:end])
                position = end
        except (IndexError, MalformedBlock):
            return None
        # If the last string is truncated, `position` is past the end of the block.
        tail = layout.tail
        if position + len(tail) != len(block) or not block.endswith(tail):
            return None
        stop = None
        if coded == len(strings):
            decoded = huffman.decode_marked(strings)
            if decoded is None:
                return None
            # No check for forbidden characters (RFC 9113 8.2.1) is needed: a NUL would count as a
            # mark, and `decode_marked` rejects the long codes of CR and LF.
            strings, size = decoded
            stop = -huffman.MARK_BYTES
        else:
            if coded and not _decoded(layout, block, strings):
                return None
            joined = b"".join(strings)
            if b"\0" in joined or b"\n" in joined or b"\r" in joined:
                return None
            size = len(joined)
        if layout.fields_bytes + size > self._max_bytes:
            return None
        values = BlockValues(layout.values, layout.places, strings, stop)
        if layout.insertions and not self._insert(layout, block, values, size):
            return None
        self._in_a_row = 0
        self._decoder.refers = layout.refers
        return values

    def _insert(self, layout: Layout[K], block: bytes, values: BlockValues, size: int) -> bool:
        """Insert a block's entries into the dynamic table.

        Return false, with the table unchanged, if that might evict an entry whose name the block
        uses (RFC 7541 4.4).
        """
        table, steps = self._table, layout.inserted_steps
        if steps is not None:
            size = sum([len(values.varying(step)) for step in steps])
        size += layout.inserted_bytes
        if layout.names and layout.named_bytes + size > table.max_bytes:
            return False
        table.add_later(layout.insertions, values, size)
        if len(block) > size:
            table.settle()  # the recorded block would take more memory than the table's limit
        # An insertion shifts the indices of older entries by one (RFC 7541 2.3.3), or evicts them.
        if layout.oldest >= FIRST_INDEXED_DYNAMIC:
            added = len(layout.insertions)
            layout.oldest += added
            if layout.oldest >= 0xFF:
                return True  # with two octets, the index does not match this layout
            layout.references = layout.references.translate(_MOVED[added])
            layout.left_bytes -= size
        if layout.is_closed:
            layout.known_at, layout.named_bytes = table.changes, size
        return True

    def _renew(self, block: bytes) -> bool:
        """Resolve a block's references and its layout's names against the current table."""
        layout, table = self.layout, self._table
        assert layout is not None
        references = block[: layout.start]
        if layout.follow(table, references):
            return True
        oldest = max(references, default=0)
        named = 1 + max((at for at, _ in layout.names), default=-1)
        referred = max(0, 1 + oldest - FIRST_INDEXED_DYNAMIC)
        newest = table.newest(max(named, referred))
        values = layout.values.copy()
        fields_bytes = layout.fields_bytes
        try:
            for place, octet in enumerate(references):
                if octet < FIRST_INDEXED_DYNAMIC:
                    token, value, _, _ = INDEXED_STATIC[octet]
                else:
                    token, value, _, _ = newest[octet - FIRST_INDEXED_DYNAMIC]
                if octet == 0xFF or token != layout.tokens[place]:
                    return False
                fields_bytes += len(value) - len(values[place])
                values[place] = value
            if any(newest[at][3] is not name for at, name in layout.names):
                return False
        except LookupError:
            return False
        layout.values, layout.fields_bytes = values, fields_bytes
        layout.named_bytes = sum(map(size_of, newest[:named]))
        layout.references, layout.oldest = references, oldest
        layout.left_bytes = table.max_bytes - sum(map(size_of, newest[:referred]))
        layout.known_at = table.changes
        layout.learn_to_follow(table)
        return True

    def note(self, kind: K, block: bytes, found: Sequence[Field]) -> None:
        """Learn the layout of a decoded block; it replaces the less recently used layout.

        This is done with exponential backoff, whenever the number of misses, in total or in a row,
        is a power of two: blocks that never repeat a layout then cost little.
        """
        self._misses += 1
        self._in_a_row += 1
        if _is_power_of_two(self._misses) or _is_power_of_two(self._in_a_row):
            layout = layout_of(kind, block, found)
            if layout is not None:
                self.layout, self._other = layout, self.layout


def _is_power_of_two(count: int) -> bool:
    return count > 1 and not count & (count - 1)
