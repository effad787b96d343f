"""The parent counts the deaths of a worker, and stops the server after too many."""

import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from xlaserve.errors import WorkerDied
from xlaserve.process.systemd import Systemd
from xlaserve.settings import Settings
from xlaserve.workers import parent, worker_process
from xlaserve.workers.parent import Supervisor

DYING = """
import socket, struct, sys

end = socket.socket(fileno=int(sys.argv[1]))
for data in (b'{"type": "Listening"}', b'{"type": "Here", "is_ready": true}', b'{"type": "Ready"}'):
    end.sendall(struct.pack("<I", len(data)) + data)
said = b""
while part := end.recv(65536):
    said += part
    if b'"Stop"' in said:
        sys.exit(0)
    if b'"is_ready":true' in said and b'"worker":1' in said:
        sys.exit(3)
"""
"""A worker that reports that it is ready; worker 1 dies as soon as the server is."""


async def test_a_worker_that_dies_five_times_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is replaced four times; the other one is asked to stop, not killed."""
    monkeypatch.setattr(worker_process, "COMMAND", (sys.executable, "-S", "-c", DYING))
    monkeypatch.setattr(parent, "_FIRST_BACKOFF_SECONDS", 0.001)
    settings = Settings.read({}, model_repository=(str(tmp_path),), processes=2)
    supervisor = Supervisor(settings, [], Systemd())
    with (
        capture_logs() as log,
        pytest.raises(WorkerDied, match="worker 1 died 5 times within a minute: .* status 3"),
    ):
        await supervisor.serve()

    deaths = [one["deaths"] for one in log if one["event"] == "worker died"]
    started = [one["worker"] for one in log if one["event"] == "worker started"]
    assert [1, 2, 3, 4, 5] == deaths
    assert (1, 5) == (started.count(0), started.count(1))
