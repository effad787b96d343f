"""Units of the cache: directories with a model's objects, complete or in progress.

A unit's directory is named by a hash of its URL and of the names, sizes and marks of all objects. A
changed object therefore leads to another unit, and a partial unit can always be resumed.

Users of a unit hold a shared lock (flock) on its directory; filling or removing it requires an
exclusive lock. The kernel releases locks however a process ends. `record.json` is written last, by
a rename: a unit without it is incomplete.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xlaserve.files.temporary import boot
from xlaserve.storage.objects import RemoteObject

FILES = "files"
RECORD = "record.json"
CLAIM = "claim"
_PARTIAL = "partial-"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """The objects of one model that make up a unit."""

    model: str
    url: str
    """The model's URL; object names are relative to it."""
    objects: tuple[RemoteObject, ...]
    """The objects, sorted by name."""

    @property
    def digest(self) -> str:
        """Return the unit's directory name."""
        rows = [(found.name, found.size_bytes, found.mark) for found in self.objects]
        return hashlib.sha256(repr((self.url, rows)).encode()).hexdigest()[:40]

    @property
    def size_bytes(self) -> int:
        """Return the total size of all objects."""
        return sum(found.size_bytes for found in self.objects)


class Unit:
    """A unit with an open directory, which can be locked."""

    def __init__(self, path: Path) -> None:
        """Open the unit's directory; raises OSError."""
        self.path = path
        self._descriptor = os.open(
            path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )

    def close(self) -> None:
        """Release the lock, if held; idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def lock(self, *, shared: bool) -> bool:
        """Try to lock the unit without waiting; false if it is locked or was removed."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
            return os.path.samestat(self.path.lstat(), os.fstat(self._descriptor))
        except (BlockingIOError, FileNotFoundError):
            return False

    @property
    def files(self) -> Path:
        """Return the directory with the files of a complete unit."""
        return self.path / FILES

    @property
    def is_whole(self) -> bool:
        """Tell whether the unit is complete."""
        return (self.path / RECORD).exists()

    def partial(self) -> Path:
        """Return the directory of a fetch in progress, including resumable files.

        Removes files from before the last boot, which may not have reached the disk.
        """
        kept = self.path / f"{_PARTIAL}{boot()}"
        for path in self.path.iterdir():
            if path not in (kept, self.path / CLAIM):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        kept.mkdir(mode=0o700, exist_ok=True)
        return kept

    def is_resumable(self) -> bool:
        """Tell whether a fetch since the last boot has left files to resume from."""
        return (self.path / f"{_PARTIAL}{boot()}").is_dir()

    def finish(self, partial: Path, hashes: Mapping[str, str], url: str) -> None:
        """Mark the unit as complete. A process that is killed earlier leaves it partial."""
        _sync_below(partial)
        partial.rename(self.files)
        text = json.dumps({"url": url, "sha256": dict(sorted(hashes.items()))}, indent=1)
        written = self.path / f"{RECORD}.new"
        with written.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        written.rename(self.path / RECORD)
        _sync(self.path)

    def is_sound(self, wanted: Wanted) -> bool:
        """Read every file; tell whether all match their recorded hashes."""
        try:
            record: Any = json.loads((self.path / RECORD).read_bytes())
            hashes = dict(record["sha256"])
            return sorted(hashes) == [found.name for found in wanted.objects] and all(
                sha256_of(self.files / name) == value for name, value in hashes.items()
            )
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def has_sizes(self, wanted: Wanted) -> bool:
        """Tell whether every file has the size of its object, without reading the files."""
        try:
            return all(
                (self.files / found.name).lstat().st_size == found.size_bytes
                for found in wanted.objects
            )
        except OSError:
            return False

    # --- the unit's share of the cache ---

    def claim(self, size_bytes: int) -> None:
        """Record the unit's final size, before it is fetched."""
        (self.path / CLAIM).write_text(str(size_bytes))

    @property
    def claimed_bytes(self) -> int:
        """Return the claimed size of the unit, or 0 without a claim."""
        try:
            return int((self.path / CLAIM).read_text())
        except (OSError, ValueError):
            return 0

    def touch(self) -> None:
        """Record the current time as the unit's last use."""
        os.utime(self.path / CLAIM)

    @property
    def used_at(self) -> float:
        """Return when the unit was last used, by the file system's clock; 0 if unknown."""
        try:
            return (self.path / CLAIM).stat().st_mtime
        except OSError:
            return 0.0

    def remove(self) -> None:
        """Remove the unit. The caller holds its exclusive lock, or the cache's lock for claims."""
        # Remove the record first: without it, remaining files count as incomplete.
        (self.path / RECORD).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file; raises OSError."""
    digest = hashlib.sha256()
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with os.fdopen(os.open(path, flags), "rb", buffering=0) as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _sync_below(directory: Path) -> None:
    for root, _directories, _names in os.walk(directory):
        _sync(Path(root))


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
