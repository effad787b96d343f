"""The HPACK dynamic table of a connection (RFC 7541 2.3.2)."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import msgspec

from xlaserve.grpc.http2.header_fields import Field, Name, size_of

TABLE_BYTES = 4096
"""Maximum size of the dynamic table: the default of RFC 9113 6.5.2, which we do not change."""


class Insertion(NamedTuple):
    """A field that every block of a layout inserts into the table (RFC 7541 6.2.1)."""

    place: int
    """Index of the field in the block."""
    token: str
    size: int
    """Size of the entry in bytes without the value."""
    name: Name


class BlockValues(msgspec.Struct, gc=False):
    """The values of a block that was decoded by its layout, assembled on demand."""

    template: list[bytes]
    """Values of all fields; those of the varying fields are placeholders."""
    places: Sequence[int]
    """Indices of the varying fields."""
    strings: list[bytes]
    """Values of the varying fields; each is followed by a mark if it was Huffman-decoded."""
    stop: int | None
    """Slice end that removes the mark from each of `strings`; None if there are no marks."""

    def all(self) -> list[bytes]:
        """Return the values of all fields."""
        values, stop = self.template.copy(), self.stop
        for place, string in zip(self.places, self.strings, strict=True):
            values[place] = string[:stop]
        return values

    def varying(self, step: int) -> bytes:
        """Return the value of the varying field with index `step`."""
        return self.strings[step][: self.stop]


Later: TypeAlias = tuple[Sequence[Insertion], BlockValues, int]
"""Entries to create on demand: a block's insertions, its values, and their total size in bytes."""


class DynamicTable:
    """Entries, newest first, with a total size of at most `max_bytes`.

    Most entries are never referenced. For a block decoded by its layout, `add_later` therefore
    only records the insertions and their size, which suffices for eviction; `settle` creates the
    entries when they are needed.

    Invariant: the contents are the same as if each entry had been created, and the oldest entries
    evicted, when it was inserted (RFC 7541 4.4).
    """

    __slots__ = ("_later", "_later_bytes", "bytes", "changes", "entries", "max_bytes")

    def __init__(self) -> None:
        # Short lists, because an empty deque takes 0.7 KB, times ten thousand connections.
        self.entries: list[Field] = []
        """The created entries, newest first; complete after `settle`."""
        self.bytes = 0
        """Total size of `entries`."""
        self.max_bytes = TABLE_BYTES
        self.changes = 0
        """Number of changes so far; each may change the meaning of indices in blocks."""
        self._later: list[Later] = []
        """Recorded insertions, newer than `entries`, oldest first; `settle` creates their entries.
        """
        self._later_bytes = 0

    def add_later(self, insertions: Sequence[Insertion], values: BlockValues, size: int) -> None:
        """Insert fields with a total size of `size` bytes; their entries are created on demand."""
        self.changes += len(insertions)
        self._later.append((insertions, values, size))
        self._later_bytes += size
        if self._later_bytes > self.max_bytes:
            if self.bytes:
                self.entries.clear()
                self.bytes = 0
            # Drop only the blocks whose entries are all evicted.
            evicted = 0
            for _, _, oldest in self._later:
                if self._later_bytes - oldest < self.max_bytes:
                    break
                self._later_bytes -= oldest
                evicted += 1
            del self._later[:evicted]

    @property
    def last(self) -> Later | None:
        """Return the last recorded insertions, or None if all entries were created."""
        return self._later[-1] if self._later else None

    def settle(self) -> None:
        """Create the entries of all recorded insertions."""
        for noted in self._later:
            self.entries[:0] = reversed(_made(noted))
        self.bytes += self._later_bytes
        self._later.clear()
        self._later_bytes = 0
        self.evict()

    def evict(self) -> None:
        """Evict the oldest entries until the table is within its limit."""
        while self.bytes > self.max_bytes:
            self.bytes -= self.entries.pop()[2]

    def newest(self, count: int) -> list[Field]:
        """Return the newest `count` entries, or all if there are fewer; the table is unchanged."""
        found: list[Field] = []
        left = self.max_bytes
        noted = (field for one in reversed(self._later) for field in reversed(_made(one)))
        for field in chain(noted, self.entries):
            left -= field[2]
            if left < 0 or len(found) == count:
                break
            found.append(field)
        return found

    def resize(self, size: int) -> None:
        """Change the size limit (RFC 7541 4.3)."""
        self.settle()  # evict by the old limit first: a larger one must not restore entries
        self.changes += 1
        self.max_bytes = size
        self.evict()

    def size(self) -> int:
        """Return the total size of the entries (RFC 7541 4.1)."""
        return sum(map(size_of, self.newest(self.changes)))


def _made(noted: Later) -> list[Field]:
    insertions, values, _ = noted
    found = values.all()
    return [
        (token, found[place], size + len(found[place]), name)
        for place, token, size, name in insertions
    ]
