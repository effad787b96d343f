"""The memory mappings of this process, which compiled programs use up.

Linux limits their number. XLA does not survive the limit: the process dies of it.
"""

import threading
from pathlib import Path

from xlaserve.errors import OutOfMappings

_OF_PROCESS = Path("/proc/self/maps")
_OF_SYSTEM = Path("/proc/sys/vm/max_map_count")
_PART = 0.8
"""Part of the system's limit: threads and buffers need some as well."""

_READ_BYTES = 1 << 20
_FIRST_GUESS = 40
"""Mappings of one program: 19 to 71 were seen on the CPU."""

_AT_LEAST = 8
_AT_MOST = 200
"""Maximum per program; larger counts have other causes."""

_COUNTED_EVERY = 16
"""Programs between two counts while many more fit: a count takes about a microsecond for each
mapping."""


class Mappings:
    """Counts memory mappings, and refuses programs that might exceed the limit. Thread-safe."""

    def __init__(
        self, limit: int = 0, of_process: Path = _OF_PROCESS, of_system: Path = _OF_SYSTEM
    ) -> None:
        """A limit of 0 is 80 % of what the system allows."""
        self._of_process = of_process
        self.system_limit = _read_number(of_system)
        """Mappings that the system allows; None where it does not say."""
        self.limit = limit or int((self.system_limit or 0) * _PART)
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._counted = 0
        self._since = 0
        """Programs that were compiled since."""
        self._each = float(_FIRST_GUESS)
        self.is_counted = bool(self.limit and self._count())
        """Whether this system has something to count."""

    @property
    def used(self) -> int:
        """Return the number of mappings at the last count."""
        return self._counted

    def count(self) -> int:
        """Count them now. Reads some 80 bytes for each."""
        with self._lock:
            return self._count() if self.is_counted else 0

    def admit(self, model: str, programs: int = 1) -> None:
        """Return if the programs may be compiled, or raise OutOfMappings."""
        if not self.is_counted:
            return
        with self._lock:
            needed = self._needed(programs)
            room = self.limit - self._counted - self._needed(self._since)
            if self._since >= _COUNTED_EVERY or room < needed + self._needed(_COUNTED_EVERY):
                self._measure()
                needed = self._needed(programs)
                if self._counted + needed > self.limit:
                    raise OutOfMappings(
                        model, needed, self._counted, self.limit, self.system_limit or 0
                    )
            self._since += 1

    def _needed(self, programs: int) -> int:
        return round(self._each * programs)

    def _measure(self) -> None:
        """Count the mappings, and learn from the difference how many a program adds."""
        before, programs = self._counted, self._since
        after = self._count()
        self._each = _FIRST_GUESS
        if programs and after > before:
            self._each = min(_AT_MOST, max(_AT_LEAST, (after - before) / programs))

    def _count(self) -> int:
        lines = 0
        try:
            with self._of_process.open("rb", buffering=0) as maps:
                while block := maps.read(_READ_BYTES):
                    lines += block.count(b"\n")
        except OSError:
            return self._counted
        self._counted, self._since = lines, 0
        return lines


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


UNLIMITED = Mappings(1, Path("/dev/null"))
"""Admits everything, without counting."""
