"""The row of the large message: its round-trip time and the memory it needs."""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from comparison import processes
from comparison.contenders import Contender, free_port
from comparison.kit import Kit, Repetition

ECHO_TOOL = Path(__file__).parents[1] / "raw_echo.py"
MESSAGES = 6
"""Messages per repetition, including the first one, for which a server allocates its memory."""
_LIMIT_SECONDS = 120.0
_URL = "http://127.0.0.1:{port}/inference.GRPCInferenceService/ModelInfer"
_ALL_WINDOWS = ("-w", "30", "-W", "30")
"""Flow-control windows that fit the whole message."""


@contextmanager
def disturbance(pid: int, found: Repetition) -> Iterator[None]:
    """Add `other_cpu` to the results of a block: the cores used by other processes."""
    busy, server, start = processes.busy_seconds(), processes.cpu_seconds(pid), time.monotonic()
    client = _children_seconds()
    yield
    wall = time.monotonic() - start
    ours = processes.cpu_seconds(pid) - server + _children_seconds() - client
    found["other_cpu"] = round((processes.busy_seconds() - busy - ours) / wall, 2)


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def measure(kit: Kit, contender: Contender) -> Repetition:
    """Send the message several times in sequence with h2load."""
    body = kit.body("big")
    found: Repetition = {}
    with tempfile.NamedTemporaryFile() as log, disturbance(contender.pid, found):
        command = ["taskset", "-c", kit.client_cpu, "h2load", "-n", str(MESSAGES), "-c1", "-m1"]
        command += [*_ALL_WINDOWS, "--log-file", log.name, "-d", str(body)]
        command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
        command.append(_URL.format(port=contender.grpc_port))
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": "no end in time"}
        lines = [line.split("\t") for line in Path(log.name).read_text().splitlines()]
    return found | _checked(ran.stdout, lines, body.stat().st_size)


def _checked(shown: str, lines: list[list[str]], size: int) -> Repetition:
    """Return the seconds per message, or an error if the answers are too small."""
    seconds = [int(line[2]) / 1e6 for line in lines if line[1] == "200"]
    data = re.search(r"\((\d+)\) data", shown)
    if len(seconds) < MESSAGES or data is None or int(data[1]) < 0.99 * size * MESSAGES:
        return {"error": f"{len(seconds)} of {MESSAGES} messages came back: {shown[-300:]}"}
    return {"seconds": statistics.median(seconds), "first_seconds": seconds[0]}


class Echo:
    """A raw TCP echo of as many bytes; a context manager."""

    def __init__(self, kit: Kit) -> None:
        self._kit, self._port = kit, free_port()
        self._size = str(kit.body("big").stat().st_size)
        self._server = subprocess.Popen(
            [
                *("taskset", "-c", kit.server_cpu, sys.executable, str(ECHO_TOOL)),
                *("serve", str(self._port), self._size),
            ],
            stdout=subprocess.PIPE,
        )
        assert self._server.stdout is not None
        self._server.stdout.readline()

    def measure(self) -> Repetition:
        """Send the bytes several times."""
        found: Repetition = {}
        command = ["taskset", "-c", self._kit.client_cpu, sys.executable, str(ECHO_TOOL)]
        command += ["measure", str(self._port), self._size, str(MESSAGES)]
        with disturbance(self._server.pid, found):
            ran = subprocess.run(
                command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=True
            )
        seconds = json.loads(ran.stdout)
        return found | {"seconds": statistics.median(seconds), "first_seconds": seconds[0]}

    def close(self) -> None:
        """Stop the echo server."""
        self._server.kill()
        self._server.communicate()
