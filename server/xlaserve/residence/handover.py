"""The file with clients' changes that a server hands to its replacement."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from xlaserve.concurrency.control_plane import Change, ChangeKind, ChangeText
from xlaserve.errors import StartFailed
from xlaserve.settings import Settings
from xlaserve.settings.choices import ModelControlMode

FORMAT = 1
"""Version of the file's format; other versions are rejected."""
MOST_HEAD_BYTES = 64 << 20
"""Maximum size of the head, without model files: it has one entry per model or region."""
_MOST_NAME_BYTES = 1024
"""Maximum length of a model file's name, which is not counted in `max_override_bytes`."""
_LENGTH_BYTES = 8
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)
"""Exceptions of msgspec for invalid input, including invalid UTF-8."""

_OF_MODELS = frozenset({ChangeKind.LOAD, ChangeKind.UNLOAD})
_OF_ALL = frozenset({ChangeKind.LOG, ChangeKind.TRACE, ChangeKind.REGISTER, ChangeKind.UNREGISTER})


class ChangesNotTaken(StartFailed):
    """The replacement could not take over the changes that clients made."""

    def __init__(self, reason: str) -> None:
        super(StartFailed, self).__init__(
            "client changes were not taken over from the running server, which continues to serve: "
            f"{reason}. Restart the service to start from the settings alone"
        )


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: ChangeKind
    subject: str
    arguments: dict[str, object]
    bytes: int
    """Size of the entry's model files; the files follow the head, in the order of the entries."""


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    changes: list[_Entry]
    versions: dict[str, list[str]] | None = None
    """Ready versions by model; None if an older server wrote the file."""


class _Format(msgspec.Struct, frozen=True):
    format: int


def kinds(settings: Settings) -> frozenset[ChangeKind]:
    """Return the kinds of changes to hand over: loads and unloads only in explicit mode."""
    explicit = settings.model_control_mode is ModelControlMode.EXPLICIT
    return _OF_ALL | _OF_MODELS if explicit else _OF_ALL


def write(
    directory: Path,
    changes: Sequence[ChangeText],
    files_of: Callable[[ChangeText], Mapping[str, bytes]],
    versions: dict[str, list[str]] | None = None,
) -> tuple[BinaryIO, Mapping[str, str]]:
    """Write changes and their model files to an unnamed file. Blocks on disk I/O.

    `versions` lists the ready versions by model. Changes whose files cannot be read are left out;
    the second return value maps their subjects to the reasons. Raises OSError.
    """
    left: dict[str, str] = {}
    file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115, its descriptor is handed over
    try:
        with tempfile.TemporaryFile(dir=directory) as contents:
            entries = []
            for change in changes:
                try:
                    files = files_of(change)
                except OSError as error:
                    left[change.subject] = f"its files cannot be read: {error.strerror or error}"
                    continue
                data = msgspec.msgpack.encode(files) if files else b""
                contents.write(data)
                fields = (change.kind, change.subject, change.arguments)
                entries.append(_Entry(*fields, len(data)))
            head = msgspec.msgpack.encode(_Head(FORMAT, entries, versions))
            file.write(len(head).to_bytes(_LENGTH_BYTES, "big") + head)
            contents.seek(0)
            while block := contents.read(1 << 20):
                file.write(block)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file, left


def versions(file: BinaryIO) -> Mapping[str, Sequence[str]] | None:
    """Return the ready versions, by model, of the server that wrote the file.

    None if an older server wrote it. Blocks on disk I/O; raises ChangesNotTaken as `read` does.
    """
    return _head(file).versions


def read(file: BinaryIO, settings: Settings) -> Iterator[Change]:
    """Yield the changes in a file, each with its model files. Blocks on disk I/O.

    Raises ChangesNotTaken if the file is truncated or of another format, or has a change of another
    kind or one that exceeds the limits in the settings.
    """
    head = _head(file)
    most = settings.max_override_bytes + settings.max_override_files * _MOST_NAME_BYTES
    allowed = kinds(settings)
    for entry in head.changes:
        if entry.kind not in _OF_ALL | _OF_MODELS:
            raise ChangesNotTaken(f"a change of the kind '{entry.kind}' is not a client change")
        if entry.bytes > most:
            raise ChangesNotTaken(
                f"the files of '{entry.subject}' have {entry.bytes} bytes, max_override_bytes is "
                f"{settings.max_override_bytes}"
            )
    for entry in head.changes:
        files: dict[str, bytes] = {}
        if entry.bytes:
            data = file.read(entry.bytes)
            try:
                files = msgspec.msgpack.decode(data, type=dict[str, bytes])
            except _UNREADABLE as error:
                raise ChangesNotTaken(f"the files of '{entry.subject}': {error}") from None
        if entry.kind in allowed:
            yield Change(entry.kind, entry.subject, entry.arguments, files)


def _head(file: BinaryIO) -> _Head:
    file.seek(0)
    size = int.from_bytes(file.read(_LENGTH_BYTES), "big")
    if size > MOST_HEAD_BYTES:
        raise ChangesNotTaken(f"they take {size} bytes, expected at most {MOST_HEAD_BYTES}")
    data = file.read(size)
    try:
        found = msgspec.msgpack.decode(data, type=_Format).format
        if found != FORMAT:
            raise ChangesNotTaken(f"they have the format {found}, this server reads {FORMAT}")
        head = msgspec.msgpack.decode(data, type=_Head)
    except _UNREADABLE as error:
        raise ChangesNotTaken(str(error)) from None
    whole = _LENGTH_BYTES + size + sum(entry.bytes for entry in head.changes)
    there = os.fstat(file.fileno()).st_size
    if there != whole:
        raise ChangesNotTaken(f"expected a file of {whole} bytes, got {there}")
    return head


def spool(directory: Path, data: bytes) -> str:
    """Write data too long for a message to a file, and return its path.

    Raises OSError after removing the file.
    """
    descriptor, name = tempfile.mkstemp(prefix=".xlaserve-change-", dir=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except OSError:
        Path(name).unlink()
        raise
    return name
