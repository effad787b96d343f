"""The directories that may contain model files; opens files only within them."""

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from xlaserve.errors import InvalidModel

# O_NONBLOCK: opening a FIFO would otherwise wait forever for a writer.
_AS_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
# Traversing a directory needs less permission than listing it; O_PATH only needs the former.
_PATH = getattr(os, "O_PATH", os.O_RDONLY)
_AS_DIRECTORY = _PATH | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY

_SWAPPED = frozenset({errno.ELOOP, errno.ENOTDIR})
"""Errors from opening a link instead of the expected file or directory."""


@dataclass(frozen=True, slots=True)
class Roots:
    """Directories within which files may be opened. Links between them are permitted."""

    directories: tuple[Path, ...]

    @classmethod
    def of(cls, directories: Iterable[Path]) -> "Roots":
        """Create roots from an operator's paths, which may be links."""
        return cls(tuple(directory.resolve() for directory in directories))

    def allow(self, resolved: Path) -> bool:
        """Tell whether a path without links is within one of the roots."""
        return self._root_of(resolved) is not None

    def confine(self, path: Path, shown_as: str = "") -> Path:
        """Resolve a path; raises InvalidModel unless it is within one of the roots.

        The error does not reveal whether the path exists. It names the path as `shown_as`, or by
        its last component.
        """
        resolved = _resolved(path)
        if resolved is None or not self.allow(resolved):
            raise InvalidModel(_outside(shown_as or path.name))
        return resolved

    def open(self, path: Path) -> BinaryIO:
        """Open a regular file within the roots, safe against links that change concurrently.

        Raises OSError, and InvalidModel if the file is outside of the roots or not regular. The
        path is resolved once, and then opened from its root downwards without following links, so
        that a link placed after the check is refused. Most paths have no links below their root and
        are opened without being resolved.
        """
        if (found := self._opened(path)) is not None:
            return _regular(found, path.name)
        resolved = self.confine(path)
        root = self._root_of(resolved)
        assert root is not None
        try:
            below = resolved.parts[len(root.parts) :]
            return _regular(_descend(root, below), path.name)
        except OSError as error:
            # From Python 3.13 on, resolve() returns a circular link itself.
            is_circle = error.errno == errno.ELOOP
            if is_circle or (error.errno in _SWAPPED and _resolved(path) != resolved):
                raise InvalidModel(_outside(path.name)) from None
            raise

    def _opened(self, path: Path) -> int | None:
        """Open a path below a root without following links, or return None if it contains one.

        Raises OSError.
        """
        root = self._root_of(path)
        if root is None or ".." in path.parts or len(path.parts) == len(root.parts):
            return None
        try:
            return _descend(root, path.parts[len(root.parts) :], os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in _SWAPPED:
                return None
            raise

    def _root_of(self, resolved: Path) -> Path | None:
        return next((root for root in self.directories if lies_in(resolved, root)), None)


def by_text(path: str) -> Path:
    """Normalize a path textually: no dots and no repeated slashes.

    `normpath` keeps two leading slashes, which Linux treats as one.
    """
    plain = os.path.normpath(path)
    return Path("/" + plain.lstrip("/") if plain.startswith("/") else plain)


def lies_in(path: Path, directory: Path) -> bool:
    """Tell, by comparing two absolute paths as text, whether `path` is `directory` or below it.

    Loads call this some hundred times, and `is_relative_to` takes 25 us because it creates every
    parent path.
    """
    parts = directory.parts
    return path.parts[: len(parts)] == parts


ANYWHERE = Roots((Path("/"),))
"""For commands that an operator runs: links may lead anywhere."""


def _outside(name: str) -> str:
    return (
        f"'{name}' is outside the model repository and every model_root (--model-root), or a link"
        " that leads outside"
    )


def _resolved(path: Path) -> Path | None:
    try:
        return path.resolve()
    # Before Python 3.13, circular links raise RuntimeError.
    except (OSError, RuntimeError, ValueError):
        return None


def _descend(root: Path, parts: tuple[str, ...], more: int = 0) -> int:
    """Open a path below a root without following links; return the descriptor.

    `more` are additional flags for opening the root itself.
    """
    flags = (_PATH if parts else os.O_RDONLY | os.O_NONBLOCK) | os.O_CLOEXEC | more
    descriptor = os.open(root, flags)
    for index, part in enumerate(parts, 1):
        flags = _AS_FILE if index == len(parts) else _AS_DIRECTORY
        try:
            inner = os.open(part, flags, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor


def _regular(descriptor: int, name: str) -> BinaryIO:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidModel(f"{name} is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)
