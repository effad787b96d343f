"""The layout of a header block: everything but the values that vary (RFC 7541, 6)."""

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
"""The kind of requests that blocks of a layout are of."""

_NEVER = 1 << 62
"""More bytes than are ever added to a table."""


Step: TypeAlias = tuple[bytes, int]
"""A literal whose value varies: everything between the value before it and the octet with the
length of its value, and how many bytes that is."""


class _Behind(NamedTuple):
    """How indexed references resolve after a block has inserted these entries into the table."""

    insertions: Sequence[Insertion]
    references: bytes
    referred: Sequence[tuple[int, int, int | None]]
    """For each reference to an entry the index of its field in the block, and of the field that was
    added, with its step if that varies."""


class Layout(Generic[K]):
    """A block without the values that vary."""

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
        """Leading fields of one octet each, as the next block has them."""
        self.start = len(references)
        self.oldest = max(references, default=0)
        """The last of these that is to an entry, if any is."""
        self.left_bytes = _NEVER
        """Bytes that may be added until that is evicted."""
        self.tokens = tuple(map(token_of, found[: self.start]))
        """Tokens of the fields that the references are to."""
        self.values = list(map(value_of, found))
        """Values of all fields; of those that vary as they were when it was learned."""
        self.fields_bytes = sum(map(size_of, found))
        """Bytes that the fields count without the values that vary."""
        self.steps: list[Step] = []
        self.places: list[int] = []
        """Indices of the fields of the steps."""
        self.has_one_timeout = [name.text for _, _, _, name in found].count(TIMEOUT) == 1
        self.timeout_step: int | None = None
        """The step of the one timeout."""
        self.refers = False
        """Whether blocks of it refer to the table."""
        self.tail = b""
        """Everything after the last value that varies."""
        self.insertions: list[Insertion] = []
        self.inserted_bytes = 0
        """Bytes that these count without the values that vary."""
        self.inserted_steps: list[int] | None = None
        """The steps of these; None for all steps."""
        self.names: list[tuple[int, Name]] = []
        """Names that are those of entries: index of the entry before the block, and the name."""
        self.named_bytes = 0
        """Bytes of these entries, and of those that are newer."""
        self.is_closed = True
        """Whether the entries that a block adds are those that the names of the next refer to."""
        self.known_at = -1
        """Count of changes of the table for which references and names mean the same."""
        self.known_behind: _Behind | None = None
        """The previous block after which they resolved to the same entries."""

    def add_step(self, place: int, name: Name, opener: bytes) -> None:
        """Note a field whose value varies."""
        if name.text == TIMEOUT and self.has_one_timeout:
            self.timeout_step = len(self.steps)
        self.steps.append((opener, len(opener)))
        self.places.append(place)
        self.fields_bytes -= len(self.values[place])

    def finish(self) -> bool:
        """Derive the facts of the whole block; return false if it is no layout."""
        self.refers = bool(self.names) or self.oldest >= FIRST_INDEXED_DYNAMIC
        added = [insertion.name for insertion in reversed(self.insertions)]
        self.is_closed = not added or all(added[at : at + 1] == [name] for at, name in self.names)
        inserted = [insertion.place for insertion in self.insertions]
        self.inserted_bytes = sum(insertion.size for insertion in self.insertions) + sum(
            len(self.values[place]) for place in inserted if place not in self.places
        )
        steps = [step for step, place in enumerate(self.places) if place in inserted]
        self.inserted_steps = None if len(steps) == len(self.steps) else steps
        # A name may be that of an entry which the block itself adds.
        return bool(self.steps) and all(at >= 0 for at, _ in self.names)

    # Blocks of two layouts alternate: remember how references resolve instead of looking it up.

    def learn_to_follow(self, table: DynamicTable) -> None:
        """Remember the last block, if all references resolve to entries that it has inserted."""
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
        """Know what references mean, where the last block has added what another one did.

        Their tokens are the same then: those of the values that vary are those of their names.
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
        # No entry of these is older than all that the block has added.
        self.named_bytes, self.left_bytes = size, table.max_bytes - size
        self.known_at = table.changes
        return True


def layout_of(kind: K, block: bytes, found: Sequence[Field]) -> Layout[K] | None:
    """Return the layout of a block that was decoded to these fields; None where it has none."""
    match = REFERENCES.match(block)
    layout = Layout(kind, found, match[0] if match else b"")
    position = opened = layout.start
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
            layout.add_step(place, name, block[opened:position])
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
