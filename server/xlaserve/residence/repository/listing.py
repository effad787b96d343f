"""Lists a repository's root: models, and why other entries are not models."""

import errno
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from xlaserve.errors import InvalidModel, InvalidName
from xlaserve.model_config.text import CONFIG_FILES
from xlaserve.residence.repository.names import check_name, is_version

RootIdentity: TypeAlias = tuple[int, int]
"""Device and inode of the root; they differ after another file system was mounted there."""

_OF_FILE_SYSTEMS = frozenset({"lost+found"})
"""Names of directories that file systems create in the root of a volume."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The entries of a root, except hidden ones and those that file systems create there."""

    root: RootIdentity
    models: tuple[str, ...]
    """Names of model directories, sorted."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Why each other entry is not a model."""


def list_root(root: Path, *, max_models: int) -> Listing:
    """List the root; raises OSError unless all of it could be read."""
    skipped: dict[str, str] = {}
    found: list[str] = []
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _OF_FILE_SYSTEMS:
                continue
            reason = _reason(entry)
            if reason:
                skipped[entry.name] = reason
            else:
                found.append(entry.name)
        status = root.stat()
    found.sort()
    skipped |= dict.fromkeys(
        found[max_models:], f"it exceeds the limit of {max_models} models (max_models)"
    )
    return Listing((status.st_dev, status.st_ino), tuple(found[:max_models]), skipped)


def _reason(entry: "os.DirEntry[str]") -> str:
    """Return why an entry is not a model; empty for a directory with a valid name."""
    try:
        if not entry.is_dir():
            return _kind(entry)
        check_name("model name", entry.name)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except InvalidName as error:
        return str(error)
    return ""


def _kind(entry: "os.DirEntry[str]") -> str:
    try:
        mode = entry.stat().st_mode
    except FileNotFoundError:
        return "it is a dangling link"
    kind = next((kind for holds, kind in _KINDS if holds(mode)), "it is not a directory")
    return f"{kind}, expected a directory"


_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISREG, "it is a file"),
    (stat.S_ISFIFO, "it is a FIFO"),
    (stat.S_ISSOCK, "it is a socket"),
    (stat.S_ISCHR, "it is a character device"),
    (stat.S_ISBLK, "it is a block device"),
)


def is_model(directory: Path) -> bool:
    """Tell whether a directory has a configuration or numbered versions."""
    if any(os.path.lexists(directory / name) for name in CONFIG_FILES):
        return True
    return any(is_version(path.name) for path in subdirectories(directory))


def subdirectories(directory: Path) -> list[Path]:
    """Return the visible subdirectories; empty if the directory is missing."""
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if path.name[:1] != "." and path.is_dir()]


def unpacked(path: Path) -> Path:
    """Return the model directory inside an unpacked archive, or the path itself.

    The path itself is returned if it is a model or a version. Raises InvalidModel if it contains
    several models.
    """
    if is_model(path):
        return path
    inner = subdirectories(path)
    models = [directory for directory in inner if is_model(directory)]
    if len(models) > 1:
        names = ", ".join(sorted(f"'{model.name}'" for model in models))
        raise InvalidModel(f"'{path}' holds several models, expected one: {names}")
    if models:
        return models[0]
    visible = [child for child in path.iterdir() if child.name[:1] != "."] if inner else []
    return inner[0] if visible == inner and len(inner) == 1 else path


def is_version_directory(path: Path) -> bool:
    """Tell whether an entry is a version directory; raises InvalidModel for a dangling link."""
    if path.is_symlink() and not path.exists():
        # The target may reappear; a version counts as deleted only when its directory entry is
        # gone.
        nothing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        raise InvalidModel(f"version '{path.name}' is a dangling link") from nothing
    return path.is_dir()
