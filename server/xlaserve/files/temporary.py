"""Temporary directories; if their process is killed, the next one removes them.

The creating process holds a lock (flock) on the directory, which the kernel releases however the
process ends. If another process can lock the directory, it is stale. Process ids would not work:
they are reused, and every container has its own.
"""

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

_NAME = re.compile(r"\.xlaserve-(?P<boot>[0-9a-f]{8})-[a-z0-9_]{8}")
_REPLACED = "replaced-"
"""Prefix, within a temporary directory, of files that `replace` has replaced."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_ANYWHERE = -100
"""AT_FDCWD: paths are not relative to an open directory."""
_EXCHANGE = 2
"""RENAME_EXCHANGE of renameat2(2)."""

_ELSEWHERE_SECONDS = 24 * 3600.0
"""File systems shared by several machines may not share locks. A directory created by another
machine, or before the last boot, is therefore kept for this long.
"""


class TemporaryDirectory:
    """A directory owned by this process, removed with its contents at the end of a block."""

    def __init__(self, parent: Path) -> None:
        """Create the directory, with a hidden name; raises OSError."""
        while True:
            path = Path(tempfile.mkdtemp(prefix=f".xlaserve-{boot()}-", dir=parent))
            descriptor = _opened(path)
            if descriptor is None:
                continue
            if _lock(descriptor) is not False and _is_at(path, descriptor):
                break
            # Another process has removed it as stale between its creation and locking.
            os.close(descriptor)
        self.path = path
        self._descriptor: int | None = descriptor
        self._made: list[Path] = []
        """Parent directories that were created for the directory, the innermost first."""

    @classmethod
    def beside(cls, target: Path) -> Self:
        """Create a temporary directory next to `target`, which the block creates; raises OSError.

        Creates missing parent directories, and removes those again that stay empty. Removes stale
        directories of other processes.
        """
        parent = target.parent
        missing = [above for above in (parent, *parent.parents) if not above.exists()]
        parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(parent)
        made = cls(parent)
        made._made = missing
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()

    def replace(self, source: Path, target: Path) -> None:
        """Rename `source` to `target`, next to this directory; replaces an existing one.

        Atomic if the system can exchange two names. Otherwise, if the process is killed in between,
        `remove_leftovers` restores the old target.
        """
        if target.exists():
            if _exchanged(source, target):
                return
            target.rename(self.path / f"{_REPLACED}{target.name}")
        source.rename(target)

    def remove(self) -> None:
        """Remove the directory and its contents. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        _put_back(self.path)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(descriptor)
        with suppress(OSError):  # stop at the first that is not empty
            for directory in self._made:
                directory.rmdir()


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two names atomically; false if the system or file system does not support it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    before, after = (os.fsencode(path.absolute()) for path in (one, other))
    return bool(rename(_ANYWHERE, before, _ANYWHERE, after, _EXCHANGE) == 0)


def remove_leftovers(parent: Path) -> int:
    """Remove the leftovers of killed processes in a directory; return their number.

    Keeps directories of running processes or of other users, and any links, files and other names.
    Ignores directories that cannot be removed.
    """
    try:
        names = os.listdir(parent)  # noqa: PTH208, there may be many, and few of them ours
    except OSError:
        return 0
    return sum(_removed(parent, name) for name in names if _NAME.fullmatch(name))


def _removed(parent: Path, name: str) -> bool:
    path = parent / name
    descriptor = _opened(path)
    if descriptor is None:
        return False
    try:
        if not _is_left(name, descriptor) or not _lock(descriptor) or not _is_at(path, descriptor):
            return False
        _put_back(path)
        shutil.rmtree(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _is_left(name: str, descriptor: int) -> bool:
    found = _NAME.fullmatch(name)
    status = os.fstat(descriptor)
    if found is None or status.st_uid != os.geteuid():
        return False
    return found["boot"] == boot() or time.time() - status.st_mtime > _ELSEWHERE_SECONDS


def _put_back(path: Path) -> None:
    with suppress(OSError):
        for replaced in path.glob(f"{_REPLACED}*"):
            target = path.parent / replaced.name.removeprefix(_REPLACED)
            if not os.path.lexists(target):
                replaced.rename(target)


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None


def _lock(descriptor: int) -> bool | None:
    """Lock a directory for this process; False if another process holds it, None if unsupported."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False


def boot() -> str:
    try:
        text = _BOOT_ID.read_bytes()
    except OSError:
        text = b""
    return hashlib.sha256(text).hexdigest()[:8]
