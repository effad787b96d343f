"""Measures rates with perf_analyzer, Triton's own client, against any server of its protocols."""

import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from comparison import processes
from comparison.kit import Kit, Repetition

_WINDOWS = 3
"""Number of successive windows that perf_analyzer averages over."""

_ANY_DEVIATION = "1000000"
"""Percentage by which windows may differ. Effectively unlimited: contenders are measured
alternately and disturbed repetitions are rejected elsewhere.
"""

_OVERHEAD_SECONDS = 60.0
_MILLISECONDS = 1000
_MICROSECONDS = 1e6
_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Asked:
    """A perf_analyzer workload."""

    model: str
    flags: tuple[str, ...]
    """Additional flags: shapes, streaming, shared memory."""
    answers: int = 1
    """Answers per request; each of them counts."""


@dataclass(frozen=True, slots=True)
class Server:
    """The address and process of the server under test."""

    grpc_port: int
    http_port: int
    pid: int


class Analyzer:
    """The perf_analyzer executable that the kit downloaded."""

    def __init__(self, kit: Kit) -> None:
        self._home = kit.cache / "pa"
        self._kit = kit

    def check(self) -> None:
        """Exit with instructions if perf_analyzer is missing."""
        if not (self._home / "perf_analyzer").exists():
            sys.exit(
                f"{self._home}: perf_analyzer is not there, run "
                f"PEERS_CACHE={self._kit.cache} {self._kit.directory}/perf_analyzer.sh fetch"
            )

    def measure(
        self, server: Server, asked: Asked, protocol: str, concurrency: int, seconds: float
    ) -> Repetition:
        """Run perf_analyzer once; `protocol` is grpc or http."""
        port = server.grpc_port if protocol == "grpc" else server.http_port
        window = int(seconds * _MILLISECONDS / _WINDOWS)
        command = ["taskset", "-c", self._kit.client_cpu, str(self._home / "perf_analyzer")]
        command += ["-m", asked.model, *asked.flags, "-u", f"127.0.0.1:{port}", "-i", protocol]
        command += ["-a", "--concurrency-range", str(concurrency), "-p", str(window)]
        command += ["-r", str(_WINDOWS), "-s", _ANY_DEVIATION]
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "found.csv"
            usage, requests = _Usage(server.pid), _requests(server, asked.model)
            try:
                ran = subprocess.run(
                    [*command, "-f", str(out)],
                    env=os.environ | {"LD_LIBRARY_PATH": str(self._home / "lib")},
                    capture_output=True,
                    text=True,
                    timeout=seconds + _OVERHEAD_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return {"error": "no end in time"}
            requests = _requests(server, asked.model) - requests
            used = usage.since(requests * asked.answers)
            if ran.returncode or not out.exists():
                return {"error": (ran.stdout + ran.stderr).strip()[-400:]}
            return read(out.read_text(), asked.answers) | used


class _Usage:
    """CPU time used by server, client and everything else since its creation."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = self._now()

    def _now(self) -> tuple[float, float, float, float]:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (
            time.monotonic(),
            processes.busy_seconds(),
            processes.cpu_seconds(self._pid),
            children.ru_utime + children.ru_stime,
        )

    def since(self, answers: int) -> Repetition:
        """Return each one's CPU time in cores, and the server's CPU time per answer."""
        wall, busy, server, client = (
            now - before for now, before in zip(self._now(), self._before, strict=True)
        )
        return {
            "cpu_us": round(server / max(answers, 1) * _MICROSECONDS, 2),
            "server_cpu": round(server / wall, 2),
            "client_cpu": round(client / wall, 2),
            "other_cpu": round((busy - server - client) / wall, 2),
        }


def read(text: str, answers: int = 1) -> Repetition:
    """Return rate and latencies of a report, in answers per second and milliseconds.

    A decoupled model gives several responses per request; an error if their ratio is not as
    expected.
    """
    rows = list(csv.DictReader(text.splitlines()))
    if not rows:
        return {"error": "perf_analyzer reported nothing"}
    last = rows[-1]
    requests = float(last["Inferences/Second"])
    rate = float(last.get("Response Throughput") or requests)
    if not requests or abs(rate / requests / answers - 1) > _TOLERANCE:
        return {"error": f"{rate:g} answers/s of {requests:g} requests/s, expected {answers} each"}
    return {
        "rps": round(rate, 1),
        "p50": round(float(last["p50 latency"]) / _MILLISECONDS, 3),
        "p99": round(float(last["p99 latency"]) / _MILLISECONDS, 3),
    }


def _requests(server: Server, model: str) -> int:
    """Return how many requests a model has answered (statistics extension)."""
    url = f"http://127.0.0.1:{server.http_port}/v2/models/{model}/stats"
    with urllib.request.urlopen(url) as answer:
        (found,) = json.load(answer)["model_stats"]
    return int(found["inference_stats"]["success"]["count"])
