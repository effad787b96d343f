import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.privileges import unprivileged

from xlaserve.errors import InvalidModel
from xlaserve.files.files import FileRecord, read_checked, size_of, write_atomically

HELLO = FileRecord(5, "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824")


def test_file_is_what_its_record_says(tmp_path: Path) -> None:
    record = write_atomically(tmp_path / "a", [b"hel", b"lo"])

    assert HELLO == record
    assert b"hello" == read_checked(tmp_path, "a", limit_bytes=5, record=record)


def test_writing_leaves_nothing_else_behind(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", [b"old"])
    write_atomically(tmp_path / "a", [b"new"])

    assert [("a", b"new")] == [(path.name, path.read_bytes()) for path in tmp_path.iterdir()]


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", [b"old"])
    with pytest.raises(TypeError):
        write_atomically(tmp_path / "a", [b"new", None])  # type: ignore[list-item]

    assert [("a", b"old")] == [(path.name, path.read_bytes()) for path in tmp_path.iterdir()]


def test_written_file_can_be_read_by_others(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", [b"x"])

    assert 0o644 == (tmp_path / "a").stat().st_mode & 0o777


def _missing(path: Path) -> None:
    pass


def _directory(path: Path) -> None:
    path.mkdir()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _too_large(path: Path) -> None:
    path.write_bytes(b"hello world")


def _cut(path: Path) -> None:
    path.write_bytes(b"hell")


def _changed(path: Path) -> None:
    path.write_bytes(b"jello")


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (_missing, "a is missing"),
        (_directory, "a is not a regular file"),
        (_fifo, "a is not a regular file"),
        (_too_large, "a has 11 bytes, more than the 10 allowed"),
        (_cut, "a has 4 bytes, the manifest says 5"),
        (_changed, "a changed after the export: its sha256 is "),
    ],
)
def test_other_file_is_refused_by_name(
    tmp_path: Path, prepare: Callable[[Path], None], expected: str
) -> None:
    prepare(tmp_path / "a")

    with pytest.raises(InvalidModel) as caught:
        read_checked(tmp_path, "a", limit_bytes=10, record=HELLO)
    assert str(caught.value).startswith(expected)


def test_missing_directory_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="^a is missing$"):
        size_of(tmp_path / "nowhere", "a", limit_bytes=10)


def test_file_in_place_of_the_directory_is_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(b"")

    with pytest.raises(InvalidModel, match="^a is missing$"):
        size_of(tmp_path / "1", "a", limit_bytes=10)


def test_unreadable_file_is_refused_by_name() -> None:
    with unprivileged() as directory:
        (directory / "a").write_bytes(b"hello")
        (directory / "a").chmod(0)

        with pytest.raises(InvalidModel, match="^a cannot be read: Permission denied$"):
            size_of(directory, "a", limit_bytes=10)
