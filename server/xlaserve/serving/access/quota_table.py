"""The use of quotas in memory that the processes of one server share.

A row is a principal's: when it asked last, until when its rate is used up, and its requests in
flight, one word for each process. Only its own process writes that word: what a process that dies
had in flight is one column, which the parent clears.
"""

import fcntl
import mmap
import os
import time
from array import array
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct

_WAYS = 16
"""Rows of a set: a principal has one of those of the set that its name chooses."""
_SPARE = 2
"""Rows per counted principal: hashed names do not fill all sets alike."""
_WORD_BYTES = 8
_KEY = Struct("=qq")
_ASKED, _USED, _IN_FLIGHT = 2, 3, 4
"""Words of a row after the two of its key; from the last on there is one per process."""
_LOCK_SECONDS = 0.05
"""Longest wait for another process, which holds a set for microseconds unless it is stopped."""
_EXCLUSIVE = fcntl.LOCK_EX | fcntl.LOCK_NB


class Contended(Exception):
    """Another process does not release a set."""


@dataclass(slots=True)
class Place:
    """The place of a principal in the table."""

    key: tuple[int, int]
    set: int
    row: int
    """Index of the first word of its row, as last seen."""


class QuotaTable:
    """Rows in a file in memory, whose sets are locked one by one.

    The locks are the file's (fcntl): those of a process that dies are released. Requests in flight
    are counted under the lock and given back without it, which may only refuse too much.
    """

    def __init__(self, descriptor: int, processes: int, max_principals: int) -> None:
        """Take a descriptor that `create` has returned, with the same numbers."""
        self.descriptor = descriptor
        self._width = _IN_FLIGHT + processes
        self._sets = _sets(max_principals)
        self._words = memoryview(mmap.mmap(descriptor, _size(processes, max_principals))).cast("q")

    @classmethod
    def create(cls, processes: int, max_principals: int) -> "QuotaTable":
        """Return an empty table, in the parent; raises OSError."""
        descriptor = os.memfd_create("xlaserve-quotas")
        os.ftruncate(descriptor, _size(processes, max_principals))
        return cls(descriptor, processes, max_principals)

    def place_of(self, name: str) -> Place:
        """Return the place of a principal, with or without a row."""
        key = _KEY.unpack(blake2b(name.encode(errors="surrogatepass"), digest_size=16).digest())
        number = key[0] % self._sets
        return Place(key, number, number * _WAYS * self._width)

    def clear(self, process: int) -> None:
        """Reset the requests in flight of a dead process."""
        column = self._words[_IN_FLIGHT + process :: self._width]
        column[:] = memoryview(array("q", bytes(len(column) * _WORD_BYTES)))

    # --- a set ---

    def lock(self, number: int) -> None:
        """Hold a set until `unlock`; raises Contended."""
        end = 0.0
        while True:
            try:
                fcntl.lockf(self.descriptor, _EXCLUSIVE, 1, number)
            except (BlockingIOError, PermissionError):
                now = time.monotonic()
                end = end or now + _LOCK_SECONDS
                if now > end:
                    raise Contended from None
                time.sleep(0)
            else:
                return

    def unlock(self, number: int) -> None:
        """Release a set."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, number)

    # --- a row, with the lock of its set held ---

    def find(self, place: Place, now_ns: int) -> bool:
        """Find the row of a principal, or give it one; false where all of the set are in use.

        Of those with nothing in flight, the one that was asked for longest ago is evicted.
        """
        words, width, key = self._words, self._width, place.key
        row = place.row
        if words[row] != key[0] or words[row + 1] != key[1]:
            begin = place.set * _WAYS * width
            rows = range(begin, begin + _WAYS * width, width)
            known = [one for one in rows if (words[one], words[one + 1]) == key]
            row = known[0] if known else self._claim(rows, key)
            if row < 0:
                return False
            place.row = row
        words[row + _ASKED] = now_ns
        return True

    def _claim(self, rows: range, key: tuple[int, int]) -> int:
        words = self._words
        idle = [row for row in rows if not self.in_flight(row)]
        if not idle:
            return -1
        row = min(idle, key=lambda one: words[one + _ASKED])
        words[row], words[row + 1] = key
        words[row + _USED] = 0
        return row

    def in_flight(self, row: int) -> int:
        """Return the requests in flight of a row, in all processes."""
        return sum(self._words[row + _IN_FLIGHT : row + self._width])

    def count(self, row: int, process: int, change: int) -> None:
        """Count requests in flight of one process, more or fewer."""
        self._words[row + _IN_FLIGHT + process] += change

    def used_until(self, row: int) -> int:
        """Return when a row's rate is unused again, in nanoseconds."""
        return self._words[row + _USED]

    def use(self, row: int, until_ns: int) -> None:
        """Set when a row's rate is unused again, in nanoseconds."""
        self._words[row + _USED] = until_ns


def _sets(max_principals: int) -> int:
    return -(-_SPARE * max_principals // _WAYS)


def _size(processes: int, max_principals: int) -> int:
    return _sets(max_principals) * _WAYS * (_IN_FLIGHT + processes) * _WORD_BYTES
