"""Opens, limits, hashes and atomically writes the files of a version directory."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from xlaserve.errors import InvalidModel
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.files.temporary import TemporaryDirectory
from xlaserve.tensors import Buffer


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A manifest's record of a file, for detecting changes and truncation."""

    size_bytes: int
    sha256: str
    """SHA-256 in lower-case hexadecimal."""


@contextmanager
def opened(
    directory: Path, name: str, *, limit_bytes: int, roots: Roots = ANYWHERE
) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file of a version directory; yields it with its size in bytes.

    Raises InvalidModel with the file's name if the file is outside of the roots, missing, too
    large, unreadable or not a regular file, or if reading it fails inside the `with` block.
    """
    try:
        with roots.open(directory / name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit_bytes:
                raise InvalidModel(f"{name} has {size} bytes, more than the {limit_bytes} allowed")
            yield file, size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InvalidModel(f"{name} is missing") from error
    except OSError as error:
        raise InvalidModel(f"{name} cannot be read: {error.strerror or error}") from error


def size_of(directory: Path, name: str, *, limit_bytes: int, roots: Roots = ANYWHERE) -> int:
    """Return the size of a file in bytes; raises like `opened`."""
    with opened(directory, name, limit_bytes=limit_bytes, roots=roots) as (_, size):
        return size


def read_exactly(file: BinaryIO, count: int, name: str) -> bytearray:
    """Read exactly `count` bytes; raises InvalidModel if the file is shorter."""
    data = bytearray(count)
    read_into(file, memoryview(data), name)
    return data


def read_into(file: BinaryIO, target: memoryview, name: str) -> None:
    """Fill a buffer from an unbuffered file; raises InvalidModel if the file is shorter."""
    readinto = getattr(file, "readinto")  # noqa: B009 - BinaryIO does not declare it
    while target:
        count = readinto(target)
        if not count:
            raise InvalidModel(f"{name} is truncated by {len(target)} bytes")
        target = target[count:]


def read_checked(
    directory: Path,
    name: str,
    *,
    limit_bytes: int,
    record: FileRecord | None = None,
    roots: Roots = ANYWHERE,
) -> bytearray:
    """Read a whole file; raises InvalidModel if it does not match its record."""
    with opened(directory, name, limit_bytes=limit_bytes, roots=roots) as (file, size):
        check_size(name, size, record)
        data = read_exactly(file, size, name)
    check_hash(name, hashlib.sha256(data).hexdigest(), record)
    return data


def check_size(name: str, size: int, record: FileRecord | None) -> None:
    """Raise InvalidModel if a file's size differs from its record."""
    if record is not None and size != record.size_bytes:
        raise InvalidModel(f"{name} has {size} bytes, the manifest says {record.size_bytes}")


def check_hash(name: str, sha256: str, record: FileRecord | None) -> None:
    """Raise InvalidModel if a file's bytes differ from its record."""
    if record is not None and sha256 != record.sha256:
        raise InvalidModel(
            f"{name} changed after the export: its sha256 is {sha256[:12]}..., "
            f"the manifest says {record.sha256[:12]}..."
        )


def write_atomically(path: Path, parts: Iterable[Buffer]) -> FileRecord:
    """Write a temporary file and rename it to its path; readers see the old or the new one."""
    digest = hashlib.sha256()
    size = 0
    with TemporaryDirectory(path.parent) as temporary:
        written = temporary.path / path.name
        with written.open("wb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
                size += memoryview(part).nbytes
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)  # readable by others whatever the umask
        written.replace(path)
    return FileRecord(size, digest.hexdigest())
