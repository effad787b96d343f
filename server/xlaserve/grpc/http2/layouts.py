"""Header blocks that differ from a known one in values only, decoded by layout (RFC 7541).

Clients write the headers of their requests in the same way each time: references to what was sent
before, and behind them literals whose names repeat. The layout of such a block is all of it but
the values of these literals. The next block of the same layout is compared with it, and only its
values are read, at a fourth of the time that decoding it takes.

A fast path only accepts: what is not the same, or has anything wrong with it, is left to `Decoder`,
with the dynamic table as it was.
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
"""Tables that move references by the number of entries added to the dynamic table."""


def _decoded(layout: Layout[K], block: bytes, strings: list[bytes]) -> bool:
    """Decode those of the strings that are coded; false where one is not as simple."""
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
    """Reads the blocks of one connection that are of one of two layouts.

    A client that adds to the table writes anew what that has evicted, every few requests: these
    blocks have a layout of their own.
    """

    def __init__(self, decoder: Decoder, max_bytes: int) -> None:
        self._decoder = decoder
        self._table = decoder.table
        self._max_bytes = max_bytes
        self.layout: Layout[K] | None = None
        """The layout of the block that was read last."""
        self._other: Layout[K] | None = None
        self._misses = 0
        """Blocks of neither layout."""
        self._in_a_row = 0
        """Those of them since one was read."""

    def read(self, block: bytes) -> BlockValues | None:
        """Return the values of the fields of a block, and take what it adds into the table.

        None, and nothing has changed, for a block that `Decoder` is to decode.
        """
        values = self._read(block)
        if values is None and self._other is not None:
            self.layout, self._other = self._other, self.layout
            values = self._read(block)
        return values

    # As long as it is to spare calls: each block passes here.
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
        # A string that is cut off ends behind the block.
        tail = layout.tail
        if position + len(tail) != len(block) or not block.endswith(tail):
            return None
        stop = None
        if coded == len(strings):
            decoded = huffman.decode_marked(strings)
            if decoded is None:
                return None
            # Of the symbols that no value may have (RFC 9113 8.2.1) NUL is that of the marks, and
            # the others are longer than those of text.
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
        """Add entries; false, and none is, where they may evict one that a name is of (4.4)."""
        table, steps = self._table, layout.inserted_steps
        if steps is not None:
            size = sum([len(values.varying(step)) for step in steps])
        size += layout.inserted_bytes
        if layout.names and layout.named_bytes + size > table.max_bytes:
            return False
        table.add_later(layout.insertions, values, size)
        if len(block) > size:
            table.settle()  # it would keep more than its limit
        # What is added moves the older entries by one index each (2.3.3), or evicts them (4.4).
        if layout.oldest >= FIRST_INDEXED_DYNAMIC:
            added = len(layout.insertions)
            layout.oldest += added
            if layout.oldest >= 0xFF:
                return True  # an index of two octets
            layout.references = layout.references.translate(_MOVED[added])
            layout.left_bytes -= size
        if layout.is_closed:
            layout.known_at, layout.named_bytes = table.changes, size
        return True

    def _renew(self, block: bytes) -> bool:
        """Look up what the references of a block and the names of its layout mean now."""
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
        """Learn the layout of a block that had to be decoded, in the place of the older one.

        The next one is learned after twice as many, in all or in a row: a client whose blocks are
        never of the same layout pays little for that.
        """
        self._misses += 1
        self._in_a_row += 1
        if _is_power_of_two(self._misses) or _is_power_of_two(self._in_a_row):
            layout = layout_of(kind, block, found)
            if layout is not None:
                self.layout, self._other = layout, self.layout


def _is_power_of_two(count: int) -> bool:
    return count > 1 and not count & (count - 1)
