"""A directory of cached footprints, keyed by a hash of everything relevant."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from xlaserve.files import files
from xlaserve.runtime.programs.footprint import Footprint

MAX_ENTRIES = 50_000
"""Maximum number of entries of about 200 bytes; the oldest are removed."""

_FORMAT = 3
_PRUNED_EVERY = 512
_SUFFIX = ".json"


def key_of(module: bytes, target: str, versions: Mapping[str, str], flags: Sequence[str]) -> str:
    """Return the cache key of a lowered module for a target."""
    text = json.dumps([_FORMAT, target, sorted(versions.items()), list(flags)])
    digest = hashlib.sha256(text.encode())
    digest.update(module)
    return digest.hexdigest()


@dataclass(slots=True)
class Results:
    """Footprints by key; nothing is cached if there is no directory."""

    directory: Path | None
    _written: int = 0

    def get(self, key: str) -> Footprint | None:
        """Return the cached footprint, or None if it is missing or unreadable."""
        if self.directory is None:
            return None
        try:
            return msgspec.json.decode(
                (self.directory / f"{key}{_SUFFIX}").read_bytes(), type=Footprint
            )
        # An unreadable entry must not prevent compilation.
        except (OSError, msgspec.MsgspecError, ValueError):
            return None

    def put(self, key: str, footprint: Footprint) -> None:
        """Store a footprint; best effort."""
        if self.directory is None:
            return
        with suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            if not self._written % _PRUNED_EVERY:
                self._prune(self.directory)
            self._written += 1
            path = self.directory / f"{key}{_SUFFIX}"
            files.write_atomically(path, [msgspec.json.encode(footprint)])

    def _prune(self, directory: Path) -> None:
        kept = sorted(directory.glob(f"*{_SUFFIX}"), key=lambda path: path.lstat().st_mtime)
        for path in kept[: max(0, len(kept) - MAX_ENTRIES + _PRUNED_EVERY)]:
            path.unlink(missing_ok=True)
