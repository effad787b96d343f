"""Backups of the versions that a migration replaces, kept until the new version has loaded.

MODEL/.replaced/1 is the old version 1, and `1.sha256` the hash of its replacement. If version 1 no
longer has that hash, it was replaced again, and the backup is obsolete.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from xlaserve.artifact import generator_record as generator
from xlaserve.artifact.manifest import FILE_NAME
from xlaserve.files.temporary import TemporaryDirectory

DIRECTORY = ".replaced"
_MARK = ".sha256"
_DESCRIPTIONS = (FILE_NAME, generator.FILE_NAME)
_BLOCK = 1 << 20

_log = structlog.get_logger("replaced")


def place_of(path: Path) -> Path:
    """Return the location of the backup of a version directory or file."""
    parent = path.parent
    # Not inside the version directory, where every file belongs to the model.
    if path.suffix and parent.name.isdecimal():
        return parent.parent / DIRECTORY / parent.name / path.name
    return parent / DIRECTORY / path.name


def keep(path: Path, successor: Path) -> bool:
    """Back up a version directory or file before `successor` replaces it.

    If `path` is itself the result of a migration, the older backup is kept. Returns True. Raises
    OSError.
    """
    place = place_of(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    is_older = place.exists() and _is_of(place, path)
    if not is_older:
        _remove(place)
        with TemporaryDirectory(place.parent) as temporary:
            staged = temporary.path / path.name
            copy(path, staged)
            staged.rename(place)
    _mark(place).write_text(f"{_digest(successor)}\n", encoding="ascii")
    return True


def put_back(path: Path) -> bool:
    """Restore the backup of a version directory or file; return False if there is none.

    Also returns False if the version has changed since the migration. Raises OSError.
    """
    place = place_of(path)
    if not place.exists() or not _is_of(place, path):
        return False
    with TemporaryDirectory(path.parent) as temporary:
        staged = temporary.path / path.name
        copy(place, staged)
        temporary.replace(staged, path)
    _forget(place)
    return True


def forget(path: Path) -> None:
    """Remove the backups of a version after the migrated one has loaded; best effort."""
    directory = path.parent / DIRECTORY
    if not directory.is_dir():
        return
    for place, current in _kept_of(directory, path):
        with suppress(OSError, ValueError):
            if _is_of(place, current):
                _forget(place)
                _log.info("migration backup removed", path=str(place))


def kept_below(path: Path) -> Sequence[Path]:
    """Return the version directories and files at or below a path that have a backup, sorted."""
    found = []
    roots = [path.parent / DIRECTORY, path.parent.parent / DIRECTORY]
    for root in dict.fromkeys((*roots, *path.rglob(DIRECTORY))):
        for mark in root.rglob(f"*{_MARK}"):
            place = mark.with_name(mark.name.removesuffix(_MARK))
            current = root.parent / place.relative_to(root)
            if place.exists() and (current == path or path in current.parents):
                found.append(current)
    return sorted(set(found))


def copy(path: Path, target: Path) -> None:
    """Copy a file or directory, using hard links where possible."""
    if path.is_dir():
        shutil.copytree(path, target, symlinks=True, copy_function=_linked)
    else:
        _linked(path, target)


def _linked(source: Path | str, target: Path | str) -> object:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another user's file, or a file system without hard links
        return shutil.copy2(source, target, follow_symlinks=False)
    return target


def _kept_of(directory: Path, path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the backups of a version directory, or of its files, with their original path."""
    yield directory / path.name, path
    for mark in (directory / path.name).glob(f"*{_MARK}"):
        name = mark.name.removesuffix(_MARK)
        yield mark.with_name(name), path / name


def _is_of(place: Path, current: Path) -> bool:
    """Tell whether the migrated version of a backup is unchanged."""
    try:
        return _mark(place).read_text(encoding="ascii").strip() == _digest(current)
    except (OSError, ValueError):
        return False


def _digest(path: Path) -> str:
    """Return the hash of a file, or of the manifests in a version directory."""
    found = [path / name for name in _DESCRIPTIONS if (path / name).exists()]
    digest = hashlib.sha256()
    for one in found or [path]:
        with one.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def _mark(place: Path) -> Path:
    return place.with_name(f"{place.name}{_MARK}")


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _forget(place: Path) -> None:
    _remove(place)
    _mark(place).unlink(missing_ok=True)
    for parent in (place.parent, place.parent.parent):
        if DIRECTORY in (parent.name, parent.parent.name):
            with suppress(OSError):  # other backups are still in it
                parent.rmdir()
