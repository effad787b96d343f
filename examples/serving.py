"""Starts `xlaserve serve` for an example and stops it; shared by all examples."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_SECONDS = 120
STOP_SECONDS = 60


@dataclass
class Server:
    """A running server."""

    process: "subprocess.Popen[bytes]"
    log: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Its log records; more are appended while it runs."""
    grpc: str = ""
    """The gRPC endpoint, in the form that `xlaserve.client` takes."""
    http: str = ""
    """The HTTP endpoint, including its scheme."""


@contextmanager
def served(repository: Path | None, *flags: str, **variables: str) -> Iterator[Server]:
    """Run a server with its models loaded, on free ports, for the duration of a block.

    `variables` are added to its environment. If the server exits, the program exits with its log.
    """
    where = [] if repository is None else [str(repository)]
    ports = ["--grpc-endpoint", "port:0", "--http-endpoint", "port:0"]
    command = [sys.executable, "-m", "xlaserve.cli", "serve", *where, *ports, *flags]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, env=os.environ | {"XLASERVE_LOG_LEVEL": "info"} | variables
    )
    server = Server(process)
    late = threading.Timer(START_SECONDS, process.kill)
    late.start()
    try:
        _await_start(server)
        late.cancel()
        # Keep reading the log: otherwise the server would block once the pipe is full.
        threading.Thread(target=_read_on, args=(server,), daemon=True).start()
        yield server
    finally:
        late.cancel()
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_start(server: Server) -> None:
    assert server.process.stderr is not None
    said = []
    for line in server.process.stderr:
        said.append(line.decode(errors="replace"))
        record = _record(line)
        server.log.append(record)
        if record.get("event") == "listening":
            server.grpc = str(record.get("grpc", ""))
            server.http = f"http://{record['http']}"
        if record.get("event") == "started":
            return
    sys.exit(f"the server ended before it was started:\n{''.join(said)}")


def _read_on(server: Server) -> None:
    assert server.process.stderr is not None
    for line in server.process.stderr:
        server.log.append(_record(line))


def _record(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {"event": line.decode(errors="replace")}
    return found if isinstance(found, dict) else {"event": found}


def stay(server: Server) -> None:
    """Wait for Ctrl-C if the program was started with --stay, so that you can look at the page."""
    if "--stay" in sys.argv:
        print(f"the status page is at {server.http}/ until Ctrl-C")
        with suppress(KeyboardInterrupt):
            server.process.wait()
