"""Quota usage in memory shared by all processes of a server.

Each principal has a row: the time of its last request, the time until which its rate is used up,
and one word per process for its requests in flight. Only that process writes the word; if it dies,
the parent clears its column.
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
"""Rows per set (set-associative): the hash of a principal's name selects the set."""
_SPARE = 2
"""Rows allocated per principal, because hashing fills sets unevenly."""
_WORD_BYTES = 8
_KEY = Struct("=qq")
_ASKED, _USED, _IN_FLIGHT = 2, 3, 4
"""Offsets in a row, after the two key words; from `_IN_FLIGHT` on there is one word per process."""
_LOCK_SECONDS = 0.05
"""Maximum wait for a lock, which other processes hold for microseconds unless suspended."""
_EXCLUSIVE = fcntl.LOCK_EX | fcntl.LOCK_NB


class Contended(Exception):
    """Another process does not release the lock of a set."""


@dataclass(slots=True)
class Place:
    """The location of a principal's row in the table."""

    key: tuple[int, int]
    set: int
    row: int
    """Index of the row's first word when it was last found."""


class QuotaTable:
    """Rows in a memory file whose sets are locked individually.

    The locks are fcntl locks, which the kernel releases when a process dies. Requests in flight are
    added under the lock and removed without it; that race can only refuse too much.
    """

    def __init__(self, descriptor: int, processes: int, max_principals: int) -> None:
        """Map the file of `create`, with the same arguments."""
        self.descriptor = descriptor
        self._width = _IN_FLIGHT + processes
        self._sets = _sets(max_principals)
        self._words = memoryview(mmap.mmap(descriptor, _size(processes, max_principals))).cast("q")

    @classmethod
    def create(cls, processes: int, max_principals: int) -> "QuotaTable":
        """Create an empty table in the parent process; raises OSError."""
        descriptor = os.memfd_create("xlaserve-quotas")
        os.ftruncate(descriptor, _size(processes, max_principals))
        return cls(descriptor, processes, max_principals)

    def place_of(self, name: str) -> Place:
        """Return the location of a principal's row, which may not exist."""
        key = _KEY.unpack(blake2b(name.encode(errors="surrogatepass"), digest_size=16).digest())
        number = key[0] % self._sets
        return Place(key, number, number * _WAYS * self._width)

    def clear(self, process: int) -> None:
        """Clear the requests in flight of a dead process."""
        column = self._words[_IN_FLIGHT + process :: self._width]
        column[:] = memoryview(array("q", bytes(len(column) * _WORD_BYTES)))

    # --- locking a set ---

    def lock(self, number: int) -> None:
        """Lock a set; raises Contended."""
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
        """Unlock a set."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, number)

    # --- rows; the set must be locked ---

    def find(self, place: Place, now_ns: int) -> bool:
        """Find or claim the row of a principal; return False if the set is full.

        Claiming evicts the least recently used row without requests in flight.
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
        """Return the requests in flight of a row, over all processes."""
        return sum(self._words[row + _IN_FLIGHT : row + self._width])

    def count(self, row: int, process: int, change: int) -> None:
        """Add `change` to a process's requests in flight."""
        self._words[row + _IN_FLIGHT + process] += change

    def used_until(self, row: int) -> int:
        """Return the time at which the row's rate is unused again, in nanoseconds."""
        return self._words[row + _USED]

    def use(self, row: int, until_ns: int) -> None:
        """Set the time at which the row's rate is unused again, in nanoseconds."""
        self._words[row + _USED] = until_ns


def _sets(max_principals: int) -> int:
    return -(-_SPARE * max_principals // _WAYS)


def _size(processes: int, max_principals: int) -> int:
    return _sets(max_principals) * _WAYS * (_IN_FLIGHT + processes) * _WORD_BYTES
