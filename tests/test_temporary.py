"""Leftovers of killed processes are removed, and nothing else."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from xlaserve.files import temporary
from xlaserve.files.temporary import TemporaryDirectory, remove_leftovers

HOLD = """
import sys, time
from pathlib import Path
from xlaserve.files.temporary import TemporaryDirectory
made = TemporaryDirectory(Path(sys.argv[1]))
(made.path / "file").write_text("text")
print(made.path, flush=True)
time.sleep(600)
"""


@contextmanager
def holder(parent: Path) -> Iterator[tuple[Path, "subprocess.Popen[str]"]]:
    """Run a process that owns a directory, until the block ends or it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(parent)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        try:
            yield Path(process.stdout.readline().strip()), process
        finally:
            process.kill()


def leftover(parent: Path) -> Path:
    """Make a directory as a killed process leaves it."""
    made = TemporaryDirectory(parent)
    (made.path / "file").write_text("text")
    assert made._descriptor is not None
    os.close(made._descriptor)
    return made.path


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_has_is_not(
    tmp_path: Path,
) -> None:
    with holder(tmp_path) as (killed, process), holder(tmp_path) as (live, _):
        assert 0 == remove_leftovers(tmp_path)

        process.send_signal(signal.SIGKILL)
        process.wait()

        assert 1 == remove_leftovers(tmp_path)
        assert (False, True) == (killed.exists(), (live / "file").exists())


def test_a_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"), TemporaryDirectory(tmp_path) as made:  # noqa: PT012
        (made.path / "file").write_text("text")
        raise ValueError("x")

    assert [] == list(tmp_path.iterdir())


def test_removing_twice_closes_no_descriptor_of_others(tmp_path: Path) -> None:
    made = TemporaryDirectory(tmp_path)
    made.remove()
    with (tmp_path / "other").open("w") as other:
        made.remove()
        other.write("text")

    assert "text" == (tmp_path / "other").read_text()


def test_nothing_of_others_is_removed(tmp_path: Path) -> None:
    """Neither other names, nor links or files with such a name."""
    name = leftover(tmp_path).name
    (tmp_path / name).rename(tmp_path / "kept")
    for other in (".digits.backup_1", ".xlaserve", f"{name}x", name[1:], ".xlaserve-0-00000000"):
        (tmp_path / other).mkdir()
    (tmp_path / name).symlink_to("kept")
    (tmp_path / f"{name[:-1]}_").touch()
    before = sorted(tmp_path.rglob("*"))

    assert 0 == remove_leftovers(tmp_path)
    assert before == sorted(tmp_path.rglob("*"))


def test_links_inside_a_leftover_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").touch()
    (leftover(tmp_path) / "link").symlink_to(tmp_path / "kept")

    assert 1 == remove_leftovers(tmp_path)
    assert ["file"] == [path.name for path in (tmp_path / "kept").iterdir()]


def test_those_of_another_user_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = leftover(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)

    assert 0 == remove_leftovers(tmp_path)


def test_those_of_another_machine_stay_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their locks may not be visible on this machine."""
    path = leftover(tmp_path)
    monkeypatch.setattr(temporary, "_BOOT_ID", tmp_path / "none")

    assert 0 == remove_leftovers(tmp_path)

    os.utime(path, (0, time.time() - 25 * 3600))

    assert 1 == remove_leftovers(tmp_path)


def test_a_directory_that_is_taken_for_a_leftover_at_once_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may remove it between its creation and its locking."""
    flock, calls = fcntl.flock, []

    def after_the_other(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(fcntl, "flock", flock)
                assert 1 == remove_leftovers(tmp_path)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", after_the_other)
    with TemporaryDirectory(tmp_path) as made:
        assert made.path.is_dir()
        assert 2 == len(calls)


def test_where_nothing_can_be_locked_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with TemporaryDirectory(tmp_path) as made:
        assert 0 == remove_leftovers(tmp_path)
        assert made.path.is_dir()

    assert [] == list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_read_has_no_leftovers(tmp_path: Path) -> None:
    assert 0 == remove_leftovers(tmp_path / "none")


@pytest.mark.parametrize("killed", [False, True])
def test_what_was_replaced_is_put_back_unless_its_successor_is_there(
    tmp_path: Path, killed: bool
) -> None:
    """Both when the replacement fails, and when the process is killed during it."""
    target = tmp_path / "1"
    target.mkdir()
    (target / "old").touch()
    made = TemporaryDirectory(tmp_path)
    with pytest.raises(FileNotFoundError):
        made.replace(made.path / "none", target)

    assert not target.exists()

    if killed:
        assert made._descriptor is not None
        os.close(made._descriptor)
        remove_leftovers(tmp_path)
    else:
        made.remove()

    assert (target / "old").exists()
    assert ["1"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot exchange names")
def test_what_is_replaced_is_there_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names are exchanged atomically: nothing is renamed away first."""
    target = tmp_path / "1"
    target.mkdir()
    (target / "old").touch()

    def refuse(source: Path, to: Path) -> Path:
        raise AssertionError(f"{source} was renamed")

    with TemporaryDirectory(tmp_path) as made:
        (made.path / "1").mkdir()
        (made.path / "1" / "new").touch()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", refuse)
            made.replace(made.path / "1", target)

    assert [target, target / "new"] == sorted(tmp_path.rglob("*"))


@pytest.mark.parametrize("exchanges", [True, False])
def test_what_was_replaced_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr("xlaserve.files.temporary._exchanged", lambda one, other: False)
    target = tmp_path / "1"
    target.mkdir()
    (target / "old").touch()
    with TemporaryDirectory(tmp_path) as made:
        (made.path / "1").mkdir()
        made.replace(made.path / "1", target)

    assert [target] == list(tmp_path.rglob("*"))
