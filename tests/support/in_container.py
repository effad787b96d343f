"""Starts a container's command, queries the server, stops it, and prints the results.

python -P in_container.py ARGUMENTS (as JSON); prints one JSON object.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from xlaserve.client import Client

SERVING = "started"
STOP_SECONDS = 60
WRITABLE = ("/", "/models", "/cache", "/scratch", "/tmp")


def writable() -> list[str]:
    """Return the pod's writable folders."""
    found = []
    for folder in WRITABLE:
        with contextlib.suppress(OSError):
            (Path(folder) / "probe").touch()
            (Path(folder) / "probe").unlink()
            found.append(folder)
    return found


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def main() -> None:
    arguments: list[str] = json.loads(sys.argv[1])
    command = [sys.executable, "-m", "xlaserve", *arguments]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    told: dict[str, Any] = {"user": os.getuid(), "writable": writable()}
    assert server.stderr is not None
    log: list[dict[str, Any]] = []
    for line in server.stderr:
        log.append(json.loads(line))
        if log[-1].get("event") == SERVING:
            break
    told["probes"] = [
        status_of(f"http://127.0.0.1:8002{path}")
        for path in ("/v2/health/live", "/v2/health/ready", "/metrics")
    ]
    with contextlib.suppress(Exception), Client("127.0.0.1:8001") as client:
        answer = client.infer("identity", {"x": np.ones((1, 16), np.float32)}, timeout=60)
        told["answer"] = answer["y"].tolist()
    told["kept"] = sorted(path.suffix for path in Path("/cache").rglob("*") if path.is_file())
    server.send_signal(signal.SIGTERM)
    log += map(json.loads, server.communicate(timeout=STOP_SECONDS)[1].splitlines())
    print(json.dumps({**told, "status": server.returncode, "log": log}))


if __name__ == "__main__":
    main()
