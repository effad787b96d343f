"""Rows in which small requests come at a rate of their own, alone or beside a large one.

h2load sends so many requests a second whether or not the ones before were answered: what a slow
answer delays is seen in the answers behind it. The large load has one request in flight, on a
connection of its own, and its client is on the core of the other client.
"""

import gzip
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from comparison.big_message import disturbance
from comparison.contenders import Contender
from comparison.kit import Kit, Repetition

_LIMIT_SECONDS = 60.0
_GRPC_PATH = "/inference.GRPCInferenceService/ModelInfer"
_GRPC_HEADERS = ("content-type: application/grpc", "te: trailers")
_IMAGES = (8, 3, 224, 224)
_WARM_SECONDS = 1.0
_LEAST_ANSWERED = 0.9
"""The share of the requests that must have been answered for a percentile to mean anything."""


@dataclass(frozen=True, slots=True)
class Paced:
    """Small requests at a rate, and what is beside them."""

    rate: int
    """Requests a second, over all connections."""
    beside: str = ""
    """The name of a large load in LARGE; none where empty."""


def _images() -> np.ndarray:
    return np.random.RandomState(1).random_sample(_IMAGES).astype(np.float32)


def _json_body(kit: Kit) -> bytes:
    images = _images()
    data = [round(float(value), 6) for value in images.ravel()]
    tensor = {"name": "x", "shape": list(images.shape), "datatype": "FP32", "data": data}
    return json.dumps({"inputs": [tensor]}).encode()


def _zipped_body(kit: Kit) -> bytes:
    return gzip.compress(_json_body(kit), 1)


def _message(kit: Kit) -> bytes:
    return kit.body("big").read_bytes()


@dataclass(frozen=True, slots=True)
class Large:
    """A request that is large."""

    title: str
    make: Callable[[Kit], bytes]
    path: str
    headers: tuple[str, ...]
    over_http2: bool = False


_INFER_IMAGES = "/v2/models/image/infer"
_JSON = "content-type: application/json"
LARGE = {
    "message": Large(
        "messages of 64 MiB over gRPC", _message, _GRPC_PATH, _GRPC_HEADERS, over_http2=True
    ),
    "json": Large("JSON of 10 MB over REST", _json_body, _INFER_IMAGES, (_JSON,)),
    "gzip": Large(
        "the same JSON in gzip", _zipped_body, _INFER_IMAGES, (_JSON, "content-encoding: gzip")
    ),
}
"""The large loads by name. Pictures in files are not among them: no peer decodes them."""


def measure(kit: Kit, contender: Contender, load: str, paced: Paced, seconds: float) -> Repetition:
    """Send `identity` at the rate, and return the percentiles of its latency in milliseconds."""
    connections, streams = map(int, load.split("x"))
    found: Repetition = {}
    with (
        tempfile.NamedTemporaryFile() as log,
        _beside(kit, contender, paced.beside),
        disturbance(contender.pid, found),
    ):
        command = ["taskset", "-c", kit.client_cpu, "h2load", "-c", str(connections)]
        command += ["-m", str(streams), f"--rps={paced.rate / connections:g}"]
        command += ["-D", f"{seconds:g}", "--warm-up-time", f"{_WARM_SECONDS:g}"]
        command += ["--log-file", log.name, "-d", str(kit.body("identity"))]
        for header in _GRPC_HEADERS:
            command += ["-H", header]
        command.append(f"http://127.0.0.1:{contender.grpc_port}{_GRPC_PATH}")
        try:
            subprocess.run(
                command, capture_output=True, timeout=seconds + _LIMIT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": "no end in time"}
        lines = [line.split("\t") for line in Path(log.name).read_text().splitlines()]
    return found | latencies(lines, paced.rate * seconds)


def latencies(lines: list[list[str]], expected: float) -> Repetition:
    """Return the percentiles of h2load's log: start, status, microseconds.

    Fewer answers than nine tenths of the expected are an error: the rate was not what was asked.
    """
    times = sorted(int(line[2]) / 1000 for line in lines if line[1] == "200")
    if len(times) < _LEAST_ANSWERED * expected or len(times) < 100:
        return {"error": f"{len(times)} of {expected:.0f} requests were answered"}
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {"rps": len(times), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}


@contextmanager
def _beside(kit: Kit, contender: Contender, name: str) -> Iterator[None]:
    """Keep one large request in flight while a block runs."""
    if not name:
        yield
        return
    large = LARGE[name]
    with tempfile.NamedTemporaryFile() as body, tempfile.NamedTemporaryFile() as log:
        body.write(large.make(kit))
        body.flush()
        port = contender.grpc_port if large.over_http2 else contender.http_port
        command = ["taskset", "-c", kit.client_cpu, "h2load", "-c1", "-m1", "-n", "1000000"]
        command += ["-w", "30", "-W", "30"] if large.over_http2 else ["--h1"]
        command += ["--log-file", log.name, "-d", body.name]
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
        if any(status != "200" for status in statuses):
            raise ValueError(f"{contender.name}: a large request was answered {statuses[:3]}")
