"""Header blocks like the one before, but for values that vary: read by their layout (RFC 7541).

Clients write the headers of their requests in the same way each time: references to what was sent
before, and behind them literals whose names repeat. The layout of such a block is all of it but
the values of these literals. The next block of the same layout is compared with it, and only its
values are read, at a fourth of the time that decoding it takes.

A fast path only accepts: what is not the same, or has anything wrong with it, is left to `Decoder`,
with the dynamic table as it was.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from xlaserve.transport.http2 import huffman
from xlaserve.transport.http2.hpack import (
    FIRST_DYNAMIC,
    FIRST_INDEXED_DYNAMIC,
    INDEXED,
    INDEXED_STATIC,
    REFERENCES,
    Decoder,
    Field,
    MalformedBlock,
    Name,
    integer,
    long_string,
    size_of,
    token_of,
    value_of,
)

K = TypeVar("K")
"""The kind of requests that blocks of a layout are of."""

_MOVED = tuple(
    bytes(
        octet + added if FIRST_INDEXED_DYNAMIC <= octet < 0xFF - added else octet
        for octet in range(0x100)
    )
    for added in range(0xFF - FIRST_INDEXED_DYNAMIC)
)
"""Tables that move references by the number of entries added to the dynamic table."""


class Step(NamedTuple):
    """A literal whose value varies."""

    place: int
    """Index of its field."""
    opener: bytes
    """Everything between the value before it and the octet with the length of its value."""
    size: int
    """Bytes of that, with the octet."""


class Insertion(NamedTuple):
    """A field that is added to the dynamic table (6.2.1)."""

    place: int
    token: str
    size: int
    """Bytes that it counts without its value."""
    name: Name


class Layout(Generic[K]):
    """A block without the values that vary."""

    __slots__ = (
        "fields_bytes",
        "insertions",
        "is_closed",
        "kind",
        "known_at",
        "named_bytes",
        "names",
        "references",
        "refers",
        "steps",
        "tail",
        "tokens",
        "values",
    )

    def __init__(self, kind: K, found: Sequence[Field], references: bytes) -> None:
        self.kind = kind
        self.references = references
        """Leading fields of one octet each, as the next block has them."""
        self.tokens = tuple(map(token_of, found[: len(references)]))
        """Their tokens."""
        self.values = list(map(value_of, found))
        """Values of all fields; of those that vary as they were when it was learned."""
        self.fields_bytes = sum(map(size_of, found)) - sum(map(len, self.values))
        """Bytes that the fields count without their values."""
        self.steps: list[Step] = []
        self.refers = False
        """Whether blocks of it refer to the table."""
        self.tail = b""
        """Everything behind the last value that varies."""
        self.insertions: list[Insertion] = []
        self.names: list[tuple[int, Name]] = []
        """Names that are those of entries: index of the entry before the block, and the name."""
        self.named_bytes = 0
        """Bytes of these entries, and of those that are newer."""
        self.is_closed = True
        """Whether the entries that a block adds are those that the names of the next refer to."""
        self.known_at = -1
        """Count of changes of the table for which references and names mean the same."""

    def finish(self) -> bool:
        """Note what follows from all of the block; false where that is no layout."""
        oldest = max(self.references, default=0)
        self.refers = bool(self.names) or oldest >= FIRST_INDEXED_DYNAMIC
        added = [insertion.name for insertion in reversed(self.insertions)]
        self.is_closed = not added or all(added[at : at + 1] == [name] for at, name in self.names)
        # A name may be that of an entry which the block itself adds.
        return bool(self.steps) and all(at >= 0 for at, _ in self.names)


def layout_of(kind: K, block: bytes, found: Sequence[Field]) -> Layout[K] | None:
    """Return the layout of a block that was decoded to these fields; None where it has none."""
    match = REFERENCES.match(block)
    layout = Layout(kind, found, match[0] if match else b"")
    position = opened = len(layout.references)
    for place in range(position, len(found)):
        token, _, size, name = found[place]
        octet = block[position]
        if octet >= INDEXED:
            if octet >= FIRST_INDEXED_DYNAMIC:
                return None  # it moves when entries are added
            position += 1
            continue
        if 0x20 <= octet < 0x40:
            return None  # a change of the table's size
        position = _behind_name(layout, block, position, name)
        value, end = long_string(block, position + 1, block[position])
        if token == name.token:
            opener = block[opened:position]
            layout.steps.append(Step(place, opener, len(opener) + 1))
            opened = end
        if octet >= 0x40:
            layout.insertions.append(Insertion(place, token, size - len(value), name))
        position = end
    layout.tail = block[opened:]
    return layout if layout.finish() else None


def _behind_name(layout: Layout[K], block: bytes, position: int, name: Name) -> int:
    """Return where the value of a literal begins; note a name that is the one of an entry."""
    most = 0x3F if block[position] >= 0x40 else 0x0F
    index = block[position] & most
    position += 1
    if index == most:
        index, position = integer(block, position, most)
    if index >= FIRST_DYNAMIC:
        layout.names.append((index - FIRST_DYNAMIC - len(layout.insertions), name))
    return position if index else long_string(block, position + 1, block[position])[1]


def _values(layout: Layout[K], block: bytes) -> list[bytes]:
    """Return the values of a block; none for a block of another layout. Raises as a decoder."""
    startswith = block.startswith
    if not startswith(layout.references):
        return []
    position = len(layout.references)
    values = layout.values.copy()
    coded: list[int] = []
    for place, opener, size in layout.steps:
        if not startswith(opener, position):
            return []
        position += size
        length = block[position - 1]
        if length < 0x7F:
            end = position + length
            values[place] = block[position:end]
        elif length & 0x7F != 0x7F:
            end = position + length - 0x80
            values[place] = block[position:end]
            coded.append(place)
        else:
            values[place], end = long_string(block, position, length)
        position = end
    # A string that is cut off ends behind the block.
    if position + len(layout.tail) != len(block) or not block.endswith(layout.tail):
        return []
    if coded:
        decoded = huffman.decode_all([values[place] for place in coded])
        for place, value in zip(coded, decoded, strict=True):
            values[place] = value
    return values


class Layouts(Generic[K]):
    """Reads the blocks of one connection that are of one of two layouts.

    A client that adds to the table writes anew what that has evicted, every few requests: these
    blocks have a layout of their own.
    """

    def __init__(self, decoder: Decoder, max_bytes: int) -> None:
        self._decoder = decoder
        self._max_bytes = max_bytes
        self.layout: Layout[K] | None = None
        """The layout of the block that was read last."""
        self._other: Layout[K] | None = None
        self._misses = 0
        """Blocks of neither layout."""
        self._in_a_row = 0
        """Those of them since one was read."""

    def read(self, block: bytes) -> list[bytes] | None:
        """Return the values of the fields of a block, and take what it adds into the table.

        None, and nothing has changed, for a block that `Decoder` is to decode.
        """
        values = self._read(block)
        if values is None and self._other is not None:
            self.layout, self._other = self._other, self.layout
            values = self._read(block)
        return values

    def _read(self, block: bytes) -> list[bytes] | None:
        layout, decoder = self.layout, self._decoder
        if layout is None or (layout.known_at != decoder.changes and not self._renew(block)):
            return None
        try:
            values = _values(layout, block)
        except (IndexError, MalformedBlock, huffman.MalformedHuffman):
            return None
        joined = b"".join(values)
        if (
            not joined
            or b"\0" in joined
            or b"\n" in joined
            or b"\r" in joined
            or layout.fields_bytes + len(joined) > self._max_bytes
        ):
            return None
        if layout.insertions and not self._insert(layout, values):
            return None
        self._in_a_row = 0
        decoder.refers = layout.refers
        return values

    def _insert(self, layout: Layout[K], values: Sequence[bytes]) -> bool:
        """Add entries; false, and none is, where they may evict one that a name is of (4.4)."""
        decoder, added = self._decoder, len(layout.insertions)
        fields = [
            (token, values[place], size + len(values[place]), name)
            for place, token, size, name in layout.insertions
        ]
        added_bytes = sum(map(size_of, fields))
        if layout.names and layout.named_bytes + added_bytes > decoder.max_table_bytes:
            return False
        decoder.insert(fields, added_bytes)
        # What is added moves the older entries by one index each (2.3.3), or evicts them (4.4).
        references = layout.references
        oldest = max(references, default=0)
        if oldest >= FIRST_INDEXED_DYNAMIC:
            if oldest + added >= min(FIRST_INDEXED_DYNAMIC + len(decoder.table), 0xFF):
                return True
            layout.references = references.translate(_MOVED[added])
        if layout.is_closed:
            layout.known_at, layout.named_bytes = decoder.changes, added_bytes
        return True

    def _renew(self, block: bytes) -> bool:
        """Look up what the references of a block and the names of its layout mean now."""
        layout, table = self.layout, self._decoder.table
        assert layout is not None
        references = block[: len(layout.tokens)]
        try:
            for place, octet in enumerate(references):
                if octet < FIRST_INDEXED_DYNAMIC:
                    token, value, _, _ = INDEXED_STATIC[octet]
                else:
                    token, value, _, _ = table[octet - FIRST_INDEXED_DYNAMIC]
                if octet == 0xFF or token != layout.tokens[place]:
                    return False
                layout.values[place] = value
            if any(table[at][3] is not name for at, name in layout.names):
                return False
        except LookupError:
            return False
        named = 1 + max((at for at, _ in layout.names), default=-1)
        layout.named_bytes = sum(map(size_of, islice(table, named)))
        layout.references = references
        layout.known_at = self._decoder.changes
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
