"""A directory of our own where compiled programs outlive the process, bounded in size.

What lies in it is machine code that is executed: nobody else may write there, and no model names
it. JAX's own bound is not used: it looks at every file for every program that is added.
"""

import hashlib
import os
import platform
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xlaserve.errors import InvalidSettings

SETTING = "compilation_cache_directory"
_PRIVATE = 0o700
_CPU_INFO = Path("/proc/cpuinfo")
_FEATURES = ("flags", "Features")


@dataclass(frozen=True, slots=True)
class CompilationCache:
    """Where compiled programs are kept, and how many bytes of them."""

    directory: Path
    max_bytes: int

    def prepare(self) -> Path:
        """Return the directory for programs of this machine, there and within bounds.

        What was not used for the longest time is removed until it is. Raises InvalidSettings where
        the directory cannot be made, or others can write to it.
        """
        path = self.directory / f"{platform.machine()}-{_processor()}"
        try:
            path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
            found = path.lstat()
        except OSError as error:
            raise InvalidSettings(SETTING, f"a directory ({error.strerror})", path) from error
        if not (
            stat.S_ISDIR(found.st_mode)
            and found.st_uid == os.geteuid()
            and stat.S_IMODE(found.st_mode) == _PRIVATE
        ):
            raise InvalidSettings(SETTING, "a directory of this user alone (mode 0700)", path)
        self._prune()
        return path

    def _prune(self) -> None:
        entries = sorted(_files(self.directory), key=lambda entry: entry.used)
        excess = sum(entry.size for entry in entries) - self.max_bytes
        for entry in entries:
            if excess <= 0:
                return
            # Another server may use the same directory, and have removed it.
            entry.path.unlink(missing_ok=True)
            excess -= entry.size


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    size: int
    used: float


def _files(directory: Path) -> Iterator[_Entry]:
    for path in directory.glob("*/*"):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(found.st_mode):
            yield _Entry(path, found.st_size, max(found.st_atime, found.st_mtime))


def _processor() -> str:
    """Return what tells processors apart that cannot run each other's programs."""
    # A home directory is shared by machines, and XLA uses every instruction that it finds.
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(_FEATURES)), platform.processor())
    return hashlib.sha256(features.encode()).hexdigest()[:12]
