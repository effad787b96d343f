"""Measures small requests at a fixed rate, with or without a large one in flight.

The large request has its own connection and its own client, h2load, on the same core as the other
client.
"""

import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from comparison.big_message import disturbance
from comparison.contenders import Contender
from comparison.kit import Kit, Repetition
from comparison.open_loop import open_loop
from comparison.paced import LARGE, Paced
from comparison.varying import identity_load


def measure(kit: Kit, contender: Contender, load: str, paced: Paced, seconds: float) -> Repetition:
    """Send `identity` requests at a fixed rate, and return latency percentiles in milliseconds."""
    found: Repetition = {}
    count = round(paced.rate * seconds)
    requests = identity_load("grpc", contender.grpc_port, load, vary=False, count=count)
    with _body(kit, paced.beside) as body, kit.on_client_cpu():
        try:
            with disturbance(contender.pid, found), _beside(contender, paced.beside, body):
                times = open_loop(requests, paced.rate, seconds)
        except (OSError, ValueError) as error:
            return {"error": str(error)[:300]}
    return found | percentiles(times, count, seconds)


def percentiles(times: Sequence[float], expected: int, seconds: float) -> Repetition:
    """Return percentiles of latencies, or an error unless all requests were answered."""
    if len(times) < expected:
        return {"error": f"{len(times)} of {expected} requests were answered"}
    cuts = [1000 * cut for cut in statistics.quantiles(times, n=100, method="inclusive")]
    return {"rps": expected / seconds, "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}


@contextmanager
def _body(kit: Kit, name: str) -> Iterator[Path | None]:
    """Keep the body of a large request in a file for the duration of a block."""
    if not name:
        yield None
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(_made(kit, name))
        file.flush()
        yield Path(file.name)


@cache
def _made(kit: Kit, name: str) -> bytes:
    return LARGE[name].make(kit)


@contextmanager
def _beside(contender: Contender, name: str, body: Path | None) -> Iterator[None]:
    """Keep one large request in flight for the duration of a block; raises ValueError if one
    fails.
    """
    if body is None:
        yield
        return
    large = LARGE[name]
    port = contender.grpc_port if large.over_http2 else contender.http_port
    with tempfile.NamedTemporaryFile() as log:
        command = ["h2load", "-c1", "-m1", "-n", "1000000"]
        command += ["-w", "30", "-W", "30"] if large.over_http2 else ["--h1"]
        command += ["--log-file", log.name, "-d", str(body)]
        for header in large.headers:
            command += ["-H", header]
        command.append(f"http://127.0.0.1:{port}{large.path}")
        client = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            client.kill()
            client.wait()
        statuses = [line.split("\t")[1] for line in Path(log.name).read_text().splitlines()]
        if not statuses or any(status != "200" for status in statuses):
            raise ValueError(f"large requests were answered {statuses[:3]}")
