import resource
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from xlaserve.process.open_files import raise_open_files
from xlaserve.settings import Settings

SETTINGS = Settings(
    repository=Path("r"),
    max_connections=3000,
    max_http_connections=500,
    max_shared_memory_regions=12,
)
WANTED = 3000 + 500 + 12 + 1024
UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "told"),
    [
        (1024, 65536, WANTED, False),
        (1024, UNLIMITED, WANTED, False),
        (1024, WANTED, WANTED, False),
        (1024, WANTED - 1, WANTED - 1, True),
        (1024, 1024, 1024, True),
        (WANTED, 65536, None, False),
        (UNLIMITED, UNLIMITED, None, False),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None, *, told: bool
) -> None:
    """The soft limit is never lowered, and the hard limit stays unchanged."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: calls.append(limits))
    with capture_logs() as log:
        raise_open_files(SETTINGS)

    expected = [] if raised is None else [(raised, hard)]
    assert expected == calls
    assert [(raised, WANTED)] * told == [(row["allowed"], row["wanted"]) for row in log]


def test_a_sandbox_that_lets_nobody_change_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 65536))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with capture_logs() as log:
        raise_open_files(SETTINGS)

    assert [(256, WANTED)] == [(row["allowed"], row["wanted"]) for row in log]
