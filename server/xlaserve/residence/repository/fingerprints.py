"""Lists the files of a version, and detects changes by fingerprints."""

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from xlaserve.errors import InvalidModel
from xlaserve.files.marks import mark_of

MAX_FILES_PER_VERSION = 10_000
"""Maximum number of files per version; a directory with more is a mistake, not a model."""

MOST_CONTENT_BYTES = 16 << 20
MOST_CONTENT_FILES = 1000
"""Maximum number and total size of a version's files that are read to detect changes."""

Fingerprint: TypeAlias = tuple[object, ...]
"""Changes when the version's configuration or one of its files changes."""


def files_below(directory: Path) -> list[Path]:
    """List the files of a version directory, or the single file itself."""
    found = [] if directory.is_dir() else [directory]
    walked = os.walk(directory, onerror=_refuse_to_skip) if not found else ()
    for root, _directories, names in walked:
        found += [Path(root, name) for name in names]
        if len(found) > MAX_FILES_PER_VERSION:
            raise InvalidModel(f"more than {MAX_FILES_PER_VERSION} files in '{directory.name}'")
    return found


def _refuse_to_skip(error: OSError) -> None:
    # A directory that cannot be listed now must not look as if it were deleted.
    raise InvalidModel(f"'{error.filename}' cannot be read: {error.strerror}") from error


def _status(file: Path) -> os.stat_result:
    try:
        status = file.stat()
    except OSError as error:
        raise InvalidModel(f"'{file.name}' cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise InvalidModel(f"'{file.name}' is not a regular file")
    return status


def fingerprint_of(directory: Path, files: Sequence[Path] | None = None) -> Fingerprint:
    """Return a value that changes when a file below a directory does, from `stat` alone.

    `files` are the files in it, if they are already listed.
    """
    found = files_below(directory) if files is None else files
    # `relative_to` would take 15 us per file.
    prefix = f"{directory}{os.sep}"
    rows: Mapping[str, os.stat_result] = {
        str(file).removeprefix(prefix): _status(file) for file in found
    }
    return tuple((name, *mark_of(status)) for name, status in sorted(rows.items()))


def content_of(files: Sequence[Path]) -> str:
    """Return a hash of the contents of the small files, in sorted order.

    Only the contents reveal a change if the file system keeps no modification times, or two changes
    have the same one. Larger files are skipped, since reading them takes as long as a load. An
    unreadable file counts as empty: the load reports it, if it needs the file.
    """
    digest = hashlib.sha256()
    left = MOST_CONTENT_BYTES
    for file in sorted(files)[:MOST_CONTENT_FILES]:
        with suppress(OSError), file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size <= left:
                left -= size
                digest.update(f"{file}\0{size}\0".encode(errors="surrogateescape"))
                digest.update(opened.read(size))
    return digest.hexdigest()
