"""A bounded on-disk cache of converted models.

An entry is a version directory as written by an importer, named by a hash of all its sources and
options, and renamed into place when it is complete. The cache is a subdirectory of the compilation
cache, which only this user can write to.
"""

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import structlog

from xlaserve.errors import InvalidSettings
from xlaserve.files.temporary import TemporaryDirectory, remove_leftovers
from xlaserve.runtime.programs.compilation_cache import CompilationCache

DIRECTORY = "converted"
"""Subdirectory of the compilation cache for converted models."""

Convert: TypeAlias = Callable[[Path], None]
"""Writes a version directory to a path that does not exist yet; raises InvalidModel or OSError."""

_KEY = re.compile("[0-9a-f]{64}")
_TEMPORARY = Path("/tmp")

_log = structlog.get_logger("conversions")


@dataclass(frozen=True, slots=True)
class ConversionLimits:
    """Limits of conversions and of their cache."""

    kept_bytes: int = 0
    """Size limit of the cache; 0 disables it, so that every load converts again."""
    model_bytes: int = 8 << 30
    """Maximum size of a source model, including its external data."""


class Conversions:
    """The cache of converted models, by key, with LRU eviction. Thread-safe.

    Several processes may share the directory. Entries appear and disappear as a whole; if an entry
    disappears while it is being read, the model is converted again.
    """

    def __init__(
        self,
        cache: CompilationCache | None = None,
        limits: ConversionLimits | None = None,
        scratch: Path = _TEMPORARY,
        *,
        compare: bool = False,
    ) -> None:
        """Without a cache nothing is kept; `scratch` holds the files of the running load."""
        self.limits = limits or ConversionLimits()
        self.compare = compare
        """Whether conversions are compared with onnxruntime, if it is installed."""
        self.converted = 0
        """Number of conversions by this process; updated from any loading thread."""
        self._cache = cache
        self._scratch = scratch
        self._lock = threading.Lock()
        """Held while entries are counted and evicted."""
        self._is_refusing = False
        """Whether the last use of the directory failed; the failure has been logged."""
        self._is_pruned = False
        """Whether the entries of earlier processes have been reduced to this process's limit."""

    @contextmanager
    def version(self, key: str, convert: Convert) -> Iterator[Path]:
        """Yield the version directory of a key, converting on a cache miss. Blocks.

        The directory exists at least until the end of the block. Raises the exceptions of
        `convert`.
        """
        parent = self._prepared()
        kept = None if parent is None else parent / key
        if kept is not None and kept.is_dir() and not kept.is_symlink():
            with suppress(OSError):
                os.utime(kept)
            yield kept
            return
        with self._made(key, parent, convert) as made:
            yield made

    def drop(self, key: str) -> None:
        """Remove a damaged entry, so that it is converted again."""
        if self._cache is not None:
            _log.warning("converted model damaged, converting again", entry=key)
            shutil.rmtree(self._cache.directory / DIRECTORY / key, ignore_errors=True)

    def _prepared(self) -> Path | None:
        if self._cache is None:
            return None
        try:
            parent = self._cache.prepare(DIRECTORY)
        except InvalidSettings as error:
            self._refuse(str(error))
            return None
        with self._lock:
            if not self._is_pruned:
                _evict(parent, self.limits.kept_bytes)
            self._is_pruned = True
        return parent if self.limits.kept_bytes else None

    def _refuse(self, reason: str) -> None:
        if not self._is_refusing:
            _log.warning("converted models not kept", reason=reason)
        self._is_refusing = True

    @contextmanager
    def _made(self, key: str, parent: Path | None, convert: Convert) -> Iterator[Path]:
        if parent is not None:
            remove_leftovers(parent)
        staging, made = self._converted(parent, convert)
        with staging:
            yield self._keep(made, parent, key)

    def _converted(self, parent: Path | None, convert: Convert) -> tuple[TemporaryDirectory, Path]:
        """Convert into a temporary directory next to the entries, or in the scratch directory."""
        if parent is not None:
            try:
                return self._convert_in(parent, convert)
            except OSError as error:
                self._refuse(error.strerror or str(error))
        return self._convert_in(self._scratch, convert)

    def _convert_in(self, parent: Path, convert: Convert) -> tuple[TemporaryDirectory, Path]:
        staging = TemporaryDirectory(parent)
        try:
            made = staging.path / "model"
            convert(made)
        except BaseException:
            staging.remove()
            raise
        with self._lock:
            self.converted += 1
        return staging, made

    def _keep(self, made: Path, parent: Path | None, key: str) -> Path:
        """Move a conversion into the cache, if it fits; return its path."""
        if parent is None or not made.is_relative_to(parent):
            return made
        size = _size(made)
        if size > self.limits.kept_bytes:
            return made
        with self._lock:
            _evict(parent, self.limits.kept_bytes - size)
            with suppress(OSError):  # Another process stored an equal conversion first.
                made.rename(parent / key)
                return parent / key
        return made


def _evict(parent: Path, most: int) -> None:
    found = []
    for entry in parent.iterdir():
        with suppress(OSError):
            if _KEY.fullmatch(entry.name):
                found.append((entry.stat().st_mtime, _size(entry), entry))
    total = sum(size for _, size, _ in found)
    for _, size, entry in sorted(found):
        if total <= most:
            return
        shutil.rmtree(entry, ignore_errors=True)
        total -= size


def _size(directory: Path) -> int:
    total = 0
    for file in directory.iterdir():
        with suppress(OSError):
            total += file.lstat().st_size
    return total
