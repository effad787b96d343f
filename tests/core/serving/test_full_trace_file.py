"""A trace file on a full disk: complete records stay readable."""

import errno
import io
import json
from pathlib import Path
from typing import Any

import pytest

from xlaserve.serving.observability.trace_file import TraceFile

TRACES = [[{"id": 1, "model_name": "m"}, {"id": 1, "timestamps": []}]]
LONG = [[{"id": 2, "model_name": "long" * 100}]]


class Disk:
    """A disk that accepts a limited number of bytes per file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 1 << 20
        monkeypatch.setattr(Path, "open", self._open_of)

    @property
    def _open_of(self) -> Any:
        disk, unbounded = self, Path.open

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                room = disk.most - self.tell()
                if room <= 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return super().write(bytes(data)[:room])

        def opened(path: Path, mode: str, buffering: int = -1) -> Any:
            if mode == "rb":
                return unbounded(path, mode)
            raw = File(path, mode.replace("b", ""))
            if not buffering:
                return raw
            return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

        return opened


@pytest.fixture(name="disk")
def _disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("room", [0, 1, 2, 50])
def test_what_was_written_is_an_array_still(tmp_path: Path, disk: Disk, room: int) -> None:
    path = tmp_path / "traces.json"
    file = TraceFile(path, 1 << 20)
    assert file.write(TRACES, 0)
    before = path.read_bytes()

    disk.most = len(before) + room
    with pytest.raises(OSError, match="No space left"):
        file.write(LONG, 0)

    assert before == path.read_bytes()
    assert TRACES[0] == json.loads(before)


def test_once_there_is_room_traces_follow(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "traces.json"
    file = TraceFile(path, 1 << 20)
    assert file.write(TRACES, 0)
    disk.most = path.stat().st_size + 9
    with pytest.raises(OSError, match="No space left"):
        file.write(LONG, 0)
    disk.most = 1 << 20
    assert file.write(LONG, 0)

    assert [*TRACES[0], *LONG[0]] == json.loads(path.read_bytes())


@pytest.mark.parametrize("each", [0, 1])
def test_nothing_is_left_of_a_file_that_could_not_be_begun(
    tmp_path: Path, disk: Disk, each: int
) -> None:
    disk.most = 20
    file = TraceFile(tmp_path / "traces.json", 1 << 20)
    with pytest.raises(OSError, match="No space left"):
        file.write(LONG, each)

    assert [b""] == [path.read_bytes() for path in tmp_path.iterdir()]
