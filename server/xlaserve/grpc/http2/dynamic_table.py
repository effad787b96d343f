"""The dynamic table of a connection: fields that header blocks refer to (RFC 7541, 2.3.2)."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import msgspec

from xlaserve.grpc.http2.header_fields import Field, Name, size_of

TABLE_BYTES = 4096
"""The largest dynamic table, as RFC 9113, 6.5.2 has it where no SETTINGS say else."""


class Insertion(NamedTuple):
    """A field that each block of a layout adds (6.2.1), whatever its value."""

    place: int
    """Index of its field in the block."""
    token: str
    size: int
    """Bytes that it counts without its value."""
    name: Name


class BlockValues(msgspec.Struct, gc=False):
    """The values of a block that was read by its layout: put together when they are asked for."""

    template: list[bytes]
    """Values of all fields, but for those that vary."""
    places: Sequence[int]
    """Indices of those."""
    strings: list[bytes]
    """Their values, with marks after them where they are decoded."""
    stop: int | None
    """The end of the value in each of these."""

    def all(self) -> list[bytes]:
        """Return the values of all fields."""
        values, stop = self.template.copy(), self.stop
        for place, string in zip(self.places, self.strings, strict=True):
            values[place] = string[:stop]
        return values

    def varying(self, step: int) -> bytes:
        """Return the value of one of the fields that vary."""
        return self.strings[step][: self.stop]


Later: TypeAlias = tuple[Sequence[Insertion], BlockValues, int]
"""The fields that a block adds, its values, and the bytes of its entries together."""


class DynamicTable:
    """Entries from the newest one on, of at most `max_bytes` together.

    Most entries are never referred to. What a block adds that is read by its layout is only noted
    (`add_later`): with its size, which says what it evicts, but without making the entries.

    Invariant: the table is the newest of what was added that is within the limit, as if every entry
    had been made, and the oldest ones evicted, when it was added (4.4).
    """

    __slots__ = ("_later", "_later_bytes", "bytes", "changes", "entries", "max_bytes")

    def __init__(self) -> None:
        # Lists: an empty deque has 0.7 KB, of ten thousand connections. They are short.
        self.entries: list[Field] = []
        """The entries that were made; all of them once `settle` was called. The newest is first."""
        self.bytes = 0
        """The size of these entries."""
        self.max_bytes = TABLE_BYTES
        self.changes = 0
        """Counts what has changed the table: blocks may mean something else since."""
        self._later: list[Later] = []
        """Entries that were added behind these; the oldest is first."""
        self._later_bytes = 0

    def add_later(self, insertions: Sequence[Insertion], values: BlockValues, size: int) -> None:
        """Add fields of `size` bytes, which are made when they are asked for."""
        self.changes += len(insertions)
        self._later.append((insertions, values, size))
        self._later_bytes += size
        if self._later_bytes > self.max_bytes:
            if self.bytes:
                self.entries.clear()
                self.bytes = 0
            # Of a block whose entries were all evicted nothing is left.
            evicted = 0
            for _, _, oldest in self._later:
                if self._later_bytes - oldest < self.max_bytes:
                    break
                self._later_bytes -= oldest
                evicted += 1
            del self._later[:evicted]

    @property
    def last(self) -> Later | None:
        """Return what was added last, if it was only noted."""
        return self._later[-1] if self._later else None

    def settle(self) -> None:
        """Make the entries that were only noted."""
        for noted in self._later:
            self.entries[:0] = reversed(_made(noted))
        self.bytes += self._later_bytes
        self._later.clear()
        self._later_bytes = 0
        self.evict()

    def evict(self) -> None:
        """Drop the oldest entries as long as they are too many."""
        while self.bytes > self.max_bytes:
            self.bytes -= self.entries.pop()[2]

    def newest(self, count: int) -> list[Field]:
        """Return this many entries, or all where there are fewer; nothing is changed."""
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
        """Change the limit (4.3)."""
        self.settle()  # what the old limit evicts does not come back with a wider one
        self.changes += 1
        self.max_bytes = size
        self.evict()

    def size(self) -> int:
        """Return the size of the entries (4.1)."""
        return sum(map(size_of, self.newest(self.changes)))


def _made(noted: Later) -> list[Field]:
    insertions, values, _ = noted
    found = values.all()
    return [
        (token, found[place], size + len(found[place]), name)
        for place, token, size, name in insertions
    ]
