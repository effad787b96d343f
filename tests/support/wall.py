"""A wall clock that a test sets, for servers in other processes."""

import mmap
import os
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from support import tools

_SOURCE = Path(__file__).with_name("wall.c")
_SECONDS = struct.Struct("q")


class Wall:
    """The wall clock of servers that run with `variables` in their environment."""

    def __init__(self, library: Path, file: Path, shared: mmap.mmap) -> None:
        self.variables: Mapping[str, str] = {"LD_PRELOAD": str(library), "MOVED_WALL": str(file)}
        self._shared = shared
        self._moved = 0

    def jump(self, seconds: int) -> None:
        """Move the clock of all running servers by some seconds, which may be negative."""
        self._moved += seconds
        _SECONDS.pack_into(self._shared, 0, self._moved)

    def time(self) -> float:
        """Return the servers' current time."""
        return time.time() + self._moved


@contextmanager
def wall(directory: Path) -> Iterator[Wall]:
    """Build a clock for servers; without a C compiler the test is skipped, or fails in CI."""
    library, file = directory / "wall.so", directory / "moved"
    compiler = tools.program("cc", "gcc", "clang")
    flags = ("-O1", "-shared", "-fPIC", "-o", library)
    subprocess.run([compiler, *flags, _SOURCE], check=True)
    file.write_bytes(bytes(_SECONDS.size))
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        with mmap.mmap(descriptor, _SECONDS.size) as shared:
            yield Wall(library, file, shared)
    finally:
        os.close(descriptor)
