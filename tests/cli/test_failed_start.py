"""A start that fails once a port is open ends as any other that fails, not by an abort."""

import subprocess
import sys
from pathlib import Path

FAILS = """
import sys
from xlaserve import cli
from xlaserve.app import server as app

def fail(*arguments):
    raise RuntimeError("no routes today")

app.http_routes = fail
sys.argv = ["xlaserve", "serve", sys.argv[1], "--http-endpoint", "port:0"]
sys.argv += ["--grpc-endpoint", "port:0", "--device", "cpu"]
cli.main()
"""


def test_a_start_that_fails_behind_an_open_port_ends_with_its_reason(tmp_path: Path) -> None:
    """libuv aborts the process where a socket is closed that it still polls."""
    command = [sys.executable, "-c", FAILS, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert 1 == ended.returncode
    assert "no routes today" in ended.stderr
    assert "Aborted" not in ended.stderr
