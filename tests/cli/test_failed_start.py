"""A startup failure after a port is open ends with an error, not with an abort."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from xlaserve.process import HANDED

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
    """libuv aborts the process if a socket that it still polls is closed."""
    command = [sys.executable, "-c", FAILS, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert 1 == ended.returncode
    assert "no routes today" in ended.stderr
    assert "Aborted" not in ended.stderr


@pytest.mark.parametrize(
    ("text", "flag", "said"),
    [
        ("flux = 3", ".", "expected the name of a setting"),
        ("", "--flux", "No such option: --flux"),
    ],
    ids=["no setting", "no flag"],
)
def test_a_replacement_whose_settings_are_wrong_says_so_in_the_log(
    tmp_path: Path, text: str, flag: str, said: str
) -> None:
    """Its lines go to the log of the server that it should replace, in JSON."""
    settings = tmp_path / "settings.toml"
    settings.write_text(text)
    command = [sys.executable, "-m", "xlaserve", "serve", "--config", str(settings)]
    command += [flag] if flag else []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handed = {"channel": theirs.fileno(), "sockets": {}, "changes": True}
        ended = subprocess.run(
            command,
            env=os.environ | {HANDED: json.dumps(handed)},
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    records = [json.loads(line) for line in ended.stderr.splitlines()]
    assert 1 == ended.returncode
    assert ["start failed"] == [record["event"] for record in records]
    assert said in records[0]["reason"]
