"""Files of recorded model changes, handed over to the next server: damaged files are refused."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from xlaserve.concurrency.control_plane import Change, ChangeKind, ChangeText
from xlaserve.residence.handover import ChangesNotTaken, read, write
from xlaserve.settings import Settings
from xlaserve.settings.choices import ModelControlMode

CHANGES = [
    ChangeText(ChangeKind.LOAD, "m", {"config": "{}"}),
    ChangeText(ChangeKind.UNLOAD, "n", {"models": ["n"]}),
]
FILES = {"1/notes.txt": b"by a client"}
EXPLICIT = Settings(repository=Path(), model_control_mode=ModelControlMode.EXPLICIT)


def written(directory: Path) -> bytes:
    file, left = write(directory, CHANGES, lambda one: FILES if one.subject == "m" else {})
    assert {} == left
    with file:
        file.seek(0)
        return file.read()


def found(path: Path, data: bytes, settings: Any = EXPLICIT) -> list[Change]:
    path.write_bytes(data)
    with path.open("rb") as file:
        return list(read(file, settings))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert found(tmp_path / "f", written(tmp_path)) == [
        Change(ChangeKind.LOAD, "m", {"config": "{}"}, FILES),
        Change(ChangeKind.UNLOAD, "n", {"models": ["n"]}),
    ]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut in the length": lambda data: data[:4],
    "cut in the head": lambda data: data[:20],
    "cut in the files": lambda data: data[:-1],
    "longer": lambda data: data + b".",
    "a length that is none": lambda data: b"\xff" * 8 + data[8:],
    "a head that is none": lambda data: data[:8] + b"\xc1" + data[9:],
    "files that are none": lambda data: data[: -len(b"by a client") - 20] + b"\xc1" * 31,
    "another format": lambda data: data.replace(b"format\x01", b"format\x02"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_refused(tmp_path: Path, how: str) -> None:
    with pytest.raises(
        ChangesNotTaken,
        match="client changes were not taken over from the running server, which continues to"
        " serve:",
    ):
        found(tmp_path / "f", DAMAGES[how](written(tmp_path)))


def test_every_octet_counts_or_does_no_harm(tmp_path: Path) -> None:
    """A changed byte is refused or changes the part that holds it: no other error is raised."""
    data = written(tmp_path)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0xFF
        try:
            found(tmp_path / "f", bytes(changed))
        except ChangesNotTaken:
            continue
        assert BytesIO(data).read(at + 1)[-1] != changed[at]
