"""One directory of the cache: objects of a model, complete or in progress.

A unit is a directory that is named for its content: the URL, and the names, sizes and marks of all
objects. So another version of an object is another unit, and what is begun can always be resumed.

Who uses a unit holds a shared lock (flock) on its directory, who fills or removes it an exclusive
one; the kernel releases both however a process ends. `record.json` is written last, by a rename:
without it nothing in the directory is taken for whole.
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
    """Objects of one model for one unit."""

    model: str
    url: str
    """The model's own; objects are named relative to it."""
    objects: tuple[RemoteObject, ...]
    """The objects of the unit, sorted by name."""

    @property
    def digest(self) -> str:
        """Return the name of the unit."""
        rows = [(found.name, found.size_bytes, found.mark) for found in self.objects]
        return hashlib.sha256(repr((self.url, rows)).encode()).hexdigest()[:40]

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all objects."""
        return sum(found.size_bytes for found in self.objects)


class Unit:
    """A unit whose directory is open, so that it can be locked."""

    def __init__(self, path: Path) -> None:
        """Open it; raises OSError."""
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
        """Lock it without waiting; tell whether that is done, and it is still at its path."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
            return os.path.samestat(self.path.lstat(), os.fstat(self._descriptor))
        except (BlockingIOError, FileNotFoundError):
            return False

    @property
    def files(self) -> Path:
        """Return the directory of its files, once complete."""
        return self.path / FILES

    @property
    def is_whole(self) -> bool:
        """Tell whether the fetch is complete: its record is written last."""
        return (self.path / RECORD).exists()

    def partial(self) -> Path:
        """Return the directory of a fetch in progress, including earlier progress.

        What was written before the machine was booted may not have reached the disk: it goes.
        """
        kept = self.path / f"{_PARTIAL}{boot()}"
        for path in self.path.iterdir():
            if path not in (kept, self.path / CLAIM):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        kept.mkdir(mode=0o700, exist_ok=True)
        return kept

    def is_resumable(self) -> bool:
        """Tell whether something of it was fetched since the machine was booted."""
        return (self.path / f"{_PARTIAL}{boot()}").is_dir()

    def finish(self, partial: Path, hashes: Mapping[str, str], url: str) -> None:
        """Record the fetch as complete; a process killed before leaves it partial."""
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
        """Read every file, and tell whether all match their hashes."""
        try:
            record: Any = json.loads((self.path / RECORD).read_bytes())
            hashes = dict(record["sha256"])
            return sorted(hashes) == [found.name for found in wanted.objects] and all(
                sha256_of(self.files / name) == value for name, value in hashes.items()
            )
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def has_sizes(self, wanted: Wanted) -> bool:
        """Tell whether every file has the size of its object, without reading it."""
        try:
            return all(
                (self.files / found.name).lstat().st_size == found.size_bytes
                for found in wanted.objects
            )
        except OSError:
            return False

    # --- what it takes of the cache ---

    def claim(self, size_bytes: int) -> None:
        """Record the unit's final size."""
        (self.path / CLAIM).write_text(str(size_bytes))

    @property
    def claimed_bytes(self) -> int:
        """Return the unit's share of the cache; 0 without a claim."""
        try:
            return int((self.path / CLAIM).read_text())
        except (OSError, ValueError):
            return 0

    def touch(self) -> None:
        """Note that it was used now."""
        os.utime(self.path / CLAIM)

    @property
    def used_at(self) -> float:
        """Return the time of its last use, by the file system's clock; 0 if unknown."""
        try:
            return (self.path / CLAIM).stat().st_mtime
        except OSError:
            return 0.0

    def remove(self) -> None:
        """Remove it, whose exclusive lock is held."""
        # The record first: without it nothing of what is left is taken for whole.
        (self.path / RECORD).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """Return the sha256 of a regular file; raises OSError."""
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
