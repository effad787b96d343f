"""Verifies model files against configured checksums (repository agent `checksum`)."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.model_config.config import Checksum

_CHUNK_BYTES = 1 << 20
_ANY_SIZE = 1 << 62


def verify(
    directory: Path,
    checksums: Iterable[Checksum],
    roots: Roots = ANYWHERE,
    check_cancelled: Callable[[], None] = lambda: None,
) -> None:
    """Verify the checksums of a model's files. Blocks.

    Raises InvalidModel that names the file, and the expected and actual checksum.
    """
    for expected in checksums:
        got = _md5(directory / expected.file, roots, check_cancelled)
        if got != expected.md5:
            raise InvalidModel(
                f"'{expected.file}' does not match its checksum (model_repository_agents):"
                f" expected MD5 {expected.md5}, got {got}"
            )


def _md5(path: Path, roots: Roots, check_cancelled: Callable[[], None]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with files.opened(path.parent, path.name, limit_bytes=_ANY_SIZE, roots=roots) as (file, size):
        left = size
        while left:
            check_cancelled()
            chunk = files.read_exactly(file, min(left, _CHUNK_BYTES), path.name)
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()
