"""Limits the number of memory mappings, which compiled programs consume.

Linux limits the mappings per process, and XLA crashes the process when it reaches the limit.
"""

import threading
from pathlib import Path

from xlaserve.errors import OutOfMappings

_OF_PROCESS = Path("/proc/self/maps")
_OF_SYSTEM = Path("/proc/sys/vm/max_map_count")
_PART = 0.8
"""Fraction of the system's limit that programs may use; threads and buffers need mappings, too."""

_READ_BYTES = 1 << 20
_FIRST_GUESS = 40
"""Initial estimate of the mappings per program; 19 to 71 were observed on the CPU."""

_AT_LEAST = 8
_AT_MOST = 200
"""Maximum plausible number per program; more must have other causes."""

_COUNTED_EVERY = 16
"""Number of programs between two counts while the limit is far away. Counting takes about a
microsecond per mapping.
"""


class Mappings:
    """Counts memory mappings; refuses programs that might exceed the limit. Thread-safe."""

    def __init__(
        self, limit: int = 0, of_process: Path = _OF_PROCESS, of_system: Path = _OF_SYSTEM
    ) -> None:
        """A limit of 0 means 80 % of the system's limit."""
        self._of_process = of_process
        self.system_limit = _read_number(of_system)
        """The system's limit, or None if it does not report one."""
        self.limit = limit or int((self.system_limit or 0) * _PART)
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._counted = 0
        self._since = 0
        """Number of programs compiled since the last count."""
        self._each = float(_FIRST_GUESS)
        self.is_counted = bool(self.limit and self._count())
        """Whether this system reports its mappings and has a limit."""

    @property
    def used(self) -> int:
        """Return the number of mappings at the last count."""
        return self._counted

    def count(self) -> int:
        """Count the mappings now. Reads about 80 bytes per mapping."""
        with self._lock:
            return self._count() if self.is_counted else 0

    def admit(self, model: str, programs: int = 1) -> None:
        """Raise OutOfMappings unless this many more programs may be compiled."""
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
        """Count the mappings, and update the estimate of mappings per program."""
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
"""Admits all programs, without counting."""
