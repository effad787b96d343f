"""Files below a directory, and fingerprints of their changes."""

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
"""Files of one version directory; more is not a model but a mistake."""

MOST_CONTENT_BYTES = 16 << 20
MOST_CONTENT_FILES = 1000
"""Limits of a version's files that are read to detect changes: number and size."""

Fingerprint: TypeAlias = tuple[object, ...]
"""Changes when a file of the version, or its configuration, changes."""


def files_below(directory: Path) -> list[Path]:
    """List the files of a version, or its single file, without reading them."""
    found = [] if directory.is_dir() else [directory]
    walked = os.walk(directory, onerror=_refuse_to_skip) if not found else ()
    for root, _directories, names in walked:
        found += [Path(root, name) for name in names]
        if len(found) > MAX_FILES_PER_VERSION:
            raise InvalidModel(f"more than {MAX_FILES_PER_VERSION} files in '{directory.name}'")
    return found


def _refuse_to_skip(error: OSError) -> None:
    # A part that cannot be listed now is not a part that is gone.
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
    """Return what changes when a file below a directory does, without reading it.

    `files` are those below it, where they were listed already.
    """
    found = files_below(directory) if files is None else files
    # `relative_to` takes 15 us.
    prefix = f"{directory}{os.sep}"
    rows: Mapping[str, os.stat_result] = {
        str(file).removeprefix(prefix): _status(file) for file in found
    }
    return tuple((name, *mark_of(status)) for name, status in sorted(rows.items()))


def content_of(files: Sequence[Path]) -> str:
    """Return a hash of the small files among some, in their order.

    Where a file system keeps no time of change, or two changes have the same, only the content
    tells. Larger files are left out: to read them takes as long as a load does. One that cannot be
    read is as good as empty: the load says what is wrong with it, if it needs it.
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
