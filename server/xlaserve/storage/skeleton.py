"""Model skeletons: directories with file headers only, from which sizes are predicted.

A skeleton needs a few kilobytes of disk and network traffic. Models are not loaded from it.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from xlaserve.artifact.weights import MAX_HEADER_BYTES
from xlaserve.errors import InvalidModel
from xlaserve.storage.fetching import FetchControl, read_part
from xlaserve.storage.objects import Read, RemoteObject, Store

_HOME_BYTES = 64 << 20
"""Maximum size of complete files outside of the version directories (configuration, labels)."""
_VERSION_BYTES = 16 << 20
"""Maximum size of complete files within a version directory."""
_LENGTH_BYTES = 8


def _whole(found: RemoteObject, read: Read) -> Iterator[bytes]:
    return read(found, 0, found.size_bytes)


def _header(found: RemoteObject, read: Read) -> Iterator[bytes]:
    if found.size_bytes < _LENGTH_BYTES:
        return
    length = b"".join(read(found, 0, _LENGTH_BYTES))
    size = min(int.from_bytes(length, "little"), MAX_HEADER_BYTES)
    yield length
    yield from read(found, _LENGTH_BYTES, min(_LENGTH_BYTES + size, found.size_bytes))


_KINDS: tuple[tuple[str, int, Callable[[RemoteObject, Read], Iterator[bytes]]], ...] = (
    (".json", _VERSION_BYTES, _whole),
    (".safetensors", 1 << 62, _header),
)
"""File suffix, maximum size, and the function that yields the part needed to predict sizes."""


def from_store(store: Store, control: FetchControl) -> Read:
    """Return a function that reads parts of objects from their store, with retries."""

    def read(found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        yield read_part(store, found, (start, stop), control)

    return read


def from_files(directory: Path) -> Read:
    """Return a function that reads parts of objects from fetched files."""

    def read(found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        with (directory / found.name).open("rb") as file:
            file.seek(start)
            yield file.read(stop - start)

    return read


def write_home(directory: Path, objects: Iterable[RemoteObject], read: Read) -> None:
    """Write a model's files outside of its version directories; raises StoreProblem and OSError."""
    for found in objects:
        is_small = found.size_bytes <= _HOME_BYTES
        _write(directory / found.name, found, _whole(found, read) if is_small else iter(()))


def write_version(directory: Path, objects: Iterable[RemoteObject], read: Read) -> None:
    """Write the files of one version that sizes are predicted from.

    Raises StoreProblem and OSError.
    """
    for found in objects:
        kinds = (
            part(found, read)
            for suffix, most, part in _KINDS
            if found.name.endswith(suffix) and found.size_bytes <= most
        )
        _write(directory / found.name, found, next(kinds, iter(())))


def _write(path: Path, found: RemoteObject, pieces: Iterator[bytes]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise InvalidModel(f"its objects contain '{found.name}' twice") from None
    with os.fdopen(descriptor, "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.truncate(found.size_bytes)
