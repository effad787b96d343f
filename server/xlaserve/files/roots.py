"""The directories that may hold model files, and their only opener."""

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from xlaserve.errors import InvalidModel

# Not blocking: to open a FIFO would otherwise wait for its other end for ever.
_AS_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
# To go through a directory takes less permission than to list it, and O_PATH no more than that.
_PATH = getattr(os, "O_PATH", os.O_RDONLY)
_AS_DIRECTORY = _PATH | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY

_SWAPPED = frozenset({errno.ELOOP, errno.ENOTDIR})
"""Errors of opening a link where a file or directory was expected."""


@dataclass(frozen=True, slots=True)
class Roots:
    """Directories below which files are opened; links may lead among them."""

    directories: tuple[Path, ...]

    @classmethod
    def of(cls, directories: Iterable[Path]) -> "Roots":
        """Make them from an operator's paths, which may be links."""
        return cls(tuple(directory.resolve() for directory in directories))

    def allow(self, resolved: Path) -> bool:
        """Tell whether a path without links lies in one of them."""
        return self._root_of(resolved) is not None

    def confine(self, path: Path, said: str = "") -> Path:
        """Resolve a path; raises InvalidModel unless it is within one of the roots.

        The text is the same whatever is there, and whether anything is. It calls the path what was
        `said`, or by its name.
        """
        resolved = _resolved(path)
        if resolved is None or not self.allow(resolved):
            raise InvalidModel(_outside(said or path.name))
        return resolved

    def open(self, path: Path) -> BinaryIO:
        """Open a regular file within the roots, safely against links that change meanwhile.

        Raises InvalidModel for one that does not, or is not regular, and OSError. The path is
        resolved once; then no link is followed on the way down from the root, so that one that is
        put there between the check and the open is refused. Where there is no link below a root, as
        a rule, the way down finds that out by itself.
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
            # A circle of links resolves to itself from Python 3.13 on.
            is_circle = error.errno == errno.ELOOP
            if is_circle or (error.errno in _SWAPPED and _resolved(path) != resolved):
                raise InvalidModel(_outside(path.name)) from None
            raise

    def _opened(self, path: Path) -> int | None:
        """Open a path that names a root and goes down from there; None where a link is on the way.

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
    """Normalize a path by its text alone: no dots, no doubled slashes.

    `normpath` keeps two at the beginning, which Linux takes for one.
    """
    plain = os.path.normpath(path)
    return Path("/" + plain.lstrip("/") if plain.startswith("/") else plain)


def lies_in(path: Path, directory: Path) -> bool:
    """Tell by the text of two absolute paths whether one is below the other, or the same.

    A load asks some hundred times. `is_relative_to` makes every parent of the path: 25 us.
    """
    parts = directory.parts
    return path.parts[: len(parts)] == parts


ANYWHERE = Roots((Path("/"),))
"""For an operator's own command line: links may lead anywhere."""


def _outside(name: str) -> str:
    return (
        f"'{name}' is outside the model repository and every model_root (--model-root), or a link"
        " that leads outside"
    )


def _resolved(path: Path) -> Path | None:
    try:
        return path.resolve()
    # Links in a circle are a RuntimeError before Python 3.13.
    except (OSError, RuntimeError, ValueError):
        return None


def _descend(root: Path, parts: tuple[str, ...], more: int = 0) -> int:
    """Open what lies below a root, following no link; returns the descriptor.

    `more` are further flags for the root itself.
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
