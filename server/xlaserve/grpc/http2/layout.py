"""The layout of a header block: everything except the varying values (RFC 7541 6)."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from xlaserve.grpc.http2.dynamic_table import DynamicTable, Insertion
from xlaserve.grpc.http2.header_fields import (
    FIRST_DYNAMIC,
    FIRST_INDEXED_DYNAMIC,
    INDEXED,
    REFERENCES,
    Field,
    Name,
    size_of,
    token_of,
    value_of,
)
from xlaserve.grpc.http2.hpack import integer, long_string
from xlaserve.grpc.http2.timeout import TIMEOUT

K = TypeVar("K")
"""The kind of request that the blocks of a layout belong to."""

_NEVER = 1 << 62
"""Stands for infinitely many bytes."""


Step: TypeAlias = tuple[bytes, int]
"""A literal field whose value varies between blocks. The pair has the constant bytes in front of
its value (after the previous varying value, up to the length octet), and their number."""


class _Behind(NamedTuple):
    """How indexed references resolve after a block has inserted these entries into the table."""

    insertions: Sequence[Insertion]
    references: bytes
    referred: Sequence[tuple[int, int, int | None]]
    """For each reference to an entry: the index of the referencing field, the index of the inserted
    field in the earlier block, and that field's step if its value varies."""


class Layout(Generic[K]):
    """A header block without its varying values; later blocks are compared with it."""

    __slots__ = (
        "fields_bytes",
        "has_one_timeout",
        "inserted_bytes",
        "inserted_steps",
        "insertions",
        "is_closed",
        "kind",
        "known_at",
        "known_behind",
        "left_bytes",
        "named_bytes",
        "names",
        "oldest",
        "places",
        "references",
        "refers",
        "start",
        "steps",
        "tail",
        "timeout_step",
        "tokens",
        "values",
    )

    def __init__(self, kind: K, found: Sequence[Field], references: bytes) -> None:
        self.kind = kind
        self.references = references
        """The one-octet indexed fields with which the next block is expected to begin."""
        self.start = len(references)
        self.oldest = max(references, default=0)
        """The highest octet in `references`, which may refer to the dynamic table."""
        self.left_bytes = _NEVER
        """Bytes that may be inserted until the oldest referenced entry is evicted."""
        self.tokens = tuple(map(token_of, found[: self.start]))
        """Tokens of the fields in `references`."""
        self.values = list(map(value_of, found))
        """Values of all fields; those of varying fields are from the block that was learned."""
        self.fields_bytes = sum(map(size_of, found))
        """Total size of the fields without the varying values."""
        self.steps: list[Step] = []
        self.places: list[int] = []
        """For each step, the index of its field in the block."""
        self.has_one_timeout = [name.text for _, _, _, name in found].count(TIMEOUT) == 1
        self.timeout_step: int | None = None
        """Index of the `grpc-timeout` step; None if the header is constant, absent or repeated."""
        self.refers = False
        """Whether blocks of this layout reference the dynamic table."""
        self.tail = b""
        """The constant bytes after the last varying value."""
        self.insertions: list[Insertion] = []
        self.inserted_bytes = 0
        """Total size of the inserted entries without their varying values."""
        self.inserted_steps: list[int] | None = None
        """Indices of the steps that insert an entry; None if all do."""
        self.names: list[tuple[int, Name]] = []
        """Names taken from the dynamic table: the entry's index before the block, and the name."""
        self.named_bytes = 0
        """Total size of the entries in `names` and of all newer ones."""
        self.is_closed = True
        """Whether the entries that a block inserts are the ones that the next block's names use."""
        self.known_at = -1
        """Value of `DynamicTable.changes` for which references and names are resolved."""
        self.known_behind: _Behind | None = None
        """The preceding block for which the remembered resolution of references is valid, or
        None."""

    def add_step(self, place: int, name: Name, opener: bytes) -> None:
        """Add a field whose value varies."""
        if name.text == TIMEOUT and self.has_one_timeout:
            self.timeout_step = len(self.steps)
        self.steps.append((opener, len(opener)))
        self.places.append(place)
        self.fields_bytes -= len(self.values[place])

    def finish(self) -> bool:
        """Compute the attributes that need the whole block; false if it has no usable layout."""
        self.refers = bool(self.names) or self.oldest >= FIRST_INDEXED_DYNAMIC
        added = [insertion.name for insertion in reversed(self.insertions)]
        self.is_closed = not added or all(added[at : at + 1] == [name] for at, name in self.names)
        inserted = [insertion.place for insertion in self.insertions]
        self.inserted_bytes = sum(insertion.size for insertion in self.insertions) + sum(
            len(self.values[place]) for place in inserted if place not in self.places
        )
        steps = [step for step, place in enumerate(self.places) if place in inserted]
        self.inserted_steps = None if len(steps) == len(self.steps) else steps
        # A negative index: the name is that of an entry which the block itself inserts.
        return bool(self.steps) and all(at >= 0 for at, _ in self.names)

    # When blocks of two layouts alternate, remember how references resolve instead of looking
    # them up.

    def learn_to_follow(self, table: DynamicTable) -> None:
        """Remember the preceding block if it inserted all entries that the references use."""
        self.known_behind = None
        if table.last is None:
            return
        insertions, block, _ = table.last
        referred = []
        for place, octet in enumerate(self.references):
            if octet >= FIRST_INDEXED_DYNAMIC:
                at = octet - FIRST_INDEXED_DYNAMIC
                if at >= len(insertions):
                    return
                added = insertions[-1 - at].place
                step = block.places.index(added) if added in block.places else None
                referred.append((place, added, step))
        if all(at < len(insertions) for at, _ in self.names):
            self.known_behind = _Behind(insertions, self.references, referred)

    def follow(self, table: DynamicTable, references: bytes) -> bool:
        """Resolve references from the preceding block, if its insertions are the remembered ones.

        Return false if they are not. The tokens need no check: the token of a varying field
        depends on its name only.
        """
        known, last = self.known_behind, table.last
        if known is None or last is None or known.references != references:
            return False
        insertions, block, size = last
        if insertions is not known.insertions or size > table.max_bytes:
            return False
        values = self.values.copy()
        for place, added, step in known.referred:
            value = block.template[added] if step is None else block.varying(step)
            self.fields_bytes += len(value) - len(values[place])
            values[place] = value
        self.values = values
        self.references, self.oldest = references, max(references, default=0)
        # The preceding block inserted all referenced entries, so its size bounds theirs.
        self.named_bytes, self.left_bytes = size, table.max_bytes - size
        self.known_at = table.changes
        return True


def layout_of(kind: K, block: bytes, found: Sequence[Field]) -> Layout[K] | None:
    """Return the layout of a block that was decoded to `found`, or None if it has none."""
    match = REFERENCES.match(block)
    layout = Layout(kind, found, match[0] if match else b"")
    position = opened = layout.start
    for place in range(position, len(found)):
        token, _, size, name = found[place]
        octet = block[position]
        if octet >= INDEXED:
            if octet >= FIRST_INDEXED_DYNAMIC:
                return None  # no layout: an index in the dynamic table changes with insertions
            position += 1
            continue
        if 0x20 <= octet < 0x40:
            return None  # no layout for blocks with a dynamic table size update
        position = _behind_name(layout, block, position, name)
        value, end = long_string(block, position + 1, block[position])
        if token == name.token:
            layout.add_step(place, name, block[opened:position])
            opened = end
        if octet >= 0x40:
            layout.insertions.append(Insertion(place, token, size - len(value), name))
        position = end
    layout.tail = block[opened:]
    return layout if layout.finish() else None


def _behind_name(layout: Layout[K], block: bytes, position: int, name: Name) -> int:
    """Return where a literal's value begins; record its name if that is from the dynamic table."""
    most = 0x3F if block[position] >= 0x40 else 0x0F
    index = block[position] & most
    position += 1
    if index == most:
        index, position = integer(block, position, most)
    if index >= FIRST_DYNAMIC:
        layout.names.append((index - FIRST_DYNAMIC - len(layout.insertions), name))
    return position if index else long_string(block, position + 1, block[position])[1]
