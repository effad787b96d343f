"""How many models load and how many processes compile by default on a given machine."""

from pathlib import Path

import pytest

from xlaserve.residence import host
from xlaserve.settings import Settings

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Simulate a machine with this many cores and this much memory."""
    cores, memory = request.param
    monkeypatch.setattr(host, "cores", lambda: cores)
    monkeypatch.setattr(host, "memory_limit_bytes", lambda: memory)


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ((1, 16 * GIB), (1, 1)),
        ((2, 24 * GIB), (2, 1)),
        ((4, 16 * GIB), (4, 2)),
        ((8, 8 * GIB), (8, 2)),
        ((64, 512 * GIB), (8, 4)),
        ((4, 3 * GIB), (4, 1)),
        ((4, 2 * GIB - 1), (4, 0)),
    ],
    indirect=["machine"],
)
@pytest.mark.usefixtures("machine")
def test_defaults_follow_cores_and_memory(tmp_path: Path, expected: tuple[int, int]) -> None:
    settings = Settings.read({}, repository=tmp_path)

    assert expected == (host.load_threads(settings), host.compile_processes(settings))


@pytest.mark.parametrize("machine", [(8, 64 * GIB)], indirect=True)
@pytest.mark.usefixtures("machine")
def test_what_is_set_counts(tmp_path: Path) -> None:
    """Explicit settings come first, then the memory limit of the container, then the machine."""
    small = Settings.read({}, repository=tmp_path, container_memory_bytes=GIB)
    given = Settings.read({}, repository=tmp_path, load_threads=3, compile_processes=7)
    none = Settings.read({}, repository=tmp_path, compile_processes=0)

    assert 0 == host.compile_processes(small)
    assert (3, 7) == (host.load_threads(given), host.compile_processes(given))
    assert 0 == host.compile_processes(none)
