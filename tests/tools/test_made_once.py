from pathlib import Path

import pytest
from support.made_once import made_once


def test_a_directory_is_made_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    made: list[Path] = []

    def make(path: Path) -> None:
        made.append(path)
        (path / "model").write_text("m")

    first = made_once(tmp_path_factory, "twice", make)
    again = made_once(tmp_path_factory, "twice", make)

    assert first == again
    assert "m" == (again / "model").read_text()
    assert 1 == len(made)


def test_what_could_not_be_made_is_made_by_the_next_that_asks(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    def fail(path: Path) -> None:
        (path / "half").touch()
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        made_once(tmp_path_factory, "failing", fail)
    made = made_once(tmp_path_factory, "failing", lambda path: (path / "whole").touch())

    assert ["whole"] == [file.name for file in made.iterdir()]


def test_the_processes_of_xdist_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Factory:
        """A process of the test run, with its own base directory."""

        def __init__(self, name: str) -> None:
            self._base = tmp_path / name

        def getbasetemp(self) -> Path:
            return self._base

        def mktemp(self, name: str) -> Path:
            path = self._base / name
            path.mkdir(parents=True)
            return path

    processes: list[pytest.TempPathFactory] = [Factory("gw0"), Factory("gw1")]  # type: ignore[list-item]
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    made = [made_once(process, "shared", lambda path: None) for process in processes]

    assert made[0] == made[1]
    assert not (tmp_path / "gw1").exists()
