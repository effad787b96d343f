"""Listing and pruning the programs of a compilation cache, by compilation environment."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from xlaserve.runtime.programs.compilation_cache import MAX_KEY_BYTES, Key, name_of

_KEYS = "*/*.json"
_O_NOATIME = getattr(os, "O_NOATIME", 0)
_DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Kept:
    """One cached program: its key, its files, and when it was last used."""

    path: Path
    key: Key
    executable: Path
    bytes: int
    used: float

    @property
    def environment(self) -> str:
        """Return the name of the program's compilation environment."""
        return name_of(self.key.environment)


@dataclass(slots=True)
class Group:
    """The programs compiled in one environment for one target."""

    target: str
    environment: Mapping[str, str]
    programs: list[Kept] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Return the total size of the files in bytes."""
        return sum(one.bytes for one in self.programs)

    @property
    def used(self) -> float:
        """Return when one of the programs was last used, in seconds since 1970."""
        return max(one.used for one in self.programs)


def grouped(kept: Iterable[Kept]) -> Sequence[Group]:
    """Group programs by target and environment, most recently used first."""
    found: dict[tuple[str, str], Group] = {}
    for one in kept:
        target = one.path.parent.name
        group = found.setdefault((target, one.environment), Group(target, one.key.environment))
        group.programs.append(one)
    return sorted(found.values(), key=lambda group: group.used, reverse=True)


def programs(directory: Path) -> Iterator[Kept]:
    """Yield the programs in a directory that have readable keys. Blocks."""
    for path in directory.glob(_KEYS):
        with suppress(OSError, ValueError):
            key = msgspec.json.decode(_content(path), type=Key)
            if not key.problem:
                yield _kept(path, key)


def _content(path: Path) -> bytes:
    """Read a file without updating its access time, which tells the cache when it was last used."""
    with open(path, "rb", opener=_unnoticed) as file:
        return file.read(MAX_KEY_BYTES)


def _unnoticed(path: str, flags: int) -> int:
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags | _O_NOATIME)
    except PermissionError:  # the file belongs to another user
        return os.open(path, flags)


def _kept(path: Path, key: Key) -> Kept:
    executable = path.parent / f"{key.sha256}.xla"
    found = [one.lstat() for one in (path, executable)]
    used = max(max(one.st_atime, one.st_mtime) for one in found)
    return Kept(path, key, executable, sum(one.st_size for one in found), used)


def chosen(
    kept: Iterable[Kept],
    *,
    most_bytes: int | None = None,
    most_days: float | None = None,
    versions: Mapping[str, str] | None = None,
) -> list[Kept]:
    """Choose the programs to remove: too old, from other versions, or above the size limit.

    Programs whose environment differs from the fields in `versions` are removed. Of the rest, the
    least recently used are removed until at most `most_bytes` remain.
    """
    removed, left = list[Kept](), list[Kept]()
    oldest = 0.0 if most_days is None else time.time() - most_days * _DAY_SECONDS
    for one in sorted(kept, key=lambda one: one.used):
        is_other = versions is not None and any(
            one.key.environment.get(name) != value for name, value in versions.items()
        )
        (removed if is_other or one.used < oldest else left).append(one)
    total = sum(one.bytes for one in left)
    for one in left:
        if most_bytes is None or total <= most_bytes:
            break
        removed.append(one)
        total -= one.bytes
    return removed


def remove(directory: Path, removed: Iterable[Kept]) -> None:
    """Remove programs, and executables without another key. Servers may be using the directory."""
    gone = list(removed)
    for one in gone:
        with suppress(OSError):
            one.path.unlink(missing_ok=True)
    # Several keys may share an executable.
    named = {one.executable for one in programs(directory)}
    for one in gone:
        if one.executable not in named:
            with suppress(OSError):
                one.executable.unlink(missing_ok=True)
