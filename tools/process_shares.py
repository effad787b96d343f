"""Measure the CPU time per request of each process of a server.

    python tools/process_shares.py [--roles front-ends] [--processes 2] [--seconds 3]

Starts a server with the models of tools/make_bench_models.py, and sends requests with h2load over
gRPC. Each line has the number of requests in a run, and the CPU time per request of the engine, of
all front ends, and of the parent, in microseconds. Other load on the machine slows all of them, but
leaves the engine's share unchanged. The time of executions is wall-clock time, and part of the
engine's. The first run of a model is discarded.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from xlaserve_proto import inference as pb

_READY_SECONDS = 240
_PATH = "/inference.GRPCInferenceService/ModelInfer"


@dataclass(frozen=True, slots=True)
class Load:
    """A load for h2load."""

    model: str
    shape: Sequence[int]
    arguments: Sequence[str]

    @property
    def body(self) -> bytes:
        """Return a request as a gRPC message."""
        tensor = pb.ModelInferRequestInferInputTensor(
            name="x", datatype="FP32", shape=list(self.shape)
        )
        count = 4
        for size in self.shape:
            count *= size
        data = bytes(
            pb.ModelInferRequest(
                model_name=self.model, inputs=[tensor], raw_input_contents=[bytes(count)]
            )
        )
        return b"\0" + len(data).to_bytes(4, "big") + data


LOADS = (
    Load("identity", (1, 16), ("-c4", "-m16")),
    Load("identity", (1, 16), ("-c64", "-m1")),
    Load("mlp", (1, 784), ("-c4", "-m16")),
    Load("mlp", (32, 784), ("-c4", "-m16")),
    Load("image", (1, 3, 224, 224), ("-c4", "-m8")),
)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time used by the threads of a process, with nanosecond resolution."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


class Counts(NamedTuple):
    """Requests answered without an error, and their executions."""

    requests: int
    executions: int
    executing_seconds: float

    def since(self, before: "Counts") -> "Counts":
        """Return the increase since then."""
        return Counts(
            self.requests - before.requests,
            self.executions - before.executions,
            self.executing_seconds - before.executing_seconds,
        )


@dataclass(frozen=True, slots=True)
class Server:
    """A running server and its processes."""

    process: "subprocess.Popen[str]"
    port: int
    """Port of the gRPC server."""
    http: int
    parts: Mapping[str, Sequence[int]]

    def counts(self, model: str) -> "Counts":
        """Return the server's counters for a model."""
        url = f"http://127.0.0.1:{self.http}/v2/models/{model}/stats"
        with urllib.request.urlopen(url) as response:
            (said,) = json.load(response)["model_stats"]
        batches = said["batch_stats"]
        return Counts(
            said["inference_stats"]["success"]["count"],
            said["execution_count"],
            sum(batch["compute_infer"]["ns"] for batch in batches) / 1e9,
        )

    def seconds(self) -> dict[str, float]:
        """Return the CPU time of each part."""
        return {part: sum(map(cpu_seconds, pids)) for part, pids in self.parts.items()}


def start(models: Path, roles: str, processes: int) -> Server:
    """Start a server, and return it once it is ready."""
    command = [sys.executable, "-m", "xlaserve.cli", "serve", str(models), "--device", "cpu"]
    command += ["--grpc-endpoint", "port:0", "--http-endpoint", "port:0"]
    command += ["--processes", str(processes), "--process-roles", roles]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    workers: dict[int, int] = {}
    ports: dict[str, int] = {}
    until = time.monotonic() + _READY_SECONDS
    for line in process.stderr:
        for name, number in re.findall(r'"(grpc|http)": ?"127.0.0.1:(\d+)"', line):
            ports[name] = int(number)
        if found := re.search(r'"worker": ?(\d+), ?"pid": ?(\d+).*worker started', line):
            workers[int(found[1])] = int(found[2])
        if "workers ready" in line:
            break
        if time.monotonic() > until:
            break
    has_engine = roles == "front-ends"
    clients = [pid for number, pid in workers.items() if number or not has_engine]
    parts: dict[str, Sequence[int]] = {"parent": [process.pid], "clients": clients}
    if has_engine:
        parts["engine"] = [workers[0]]
    return Server(process, ports["grpc"], ports["http"], parts)


def ask(server: Server, load: Load, seconds: int) -> Counts:
    """Send requests for some seconds, and return the increase of the server's counters."""
    before = server.counts(load.model)
    with tempfile.NamedTemporaryFile() as file:
        file.write(load.body)
        file.flush()
        command = ["h2load", "-D", str(seconds), *load.arguments, "-d", file.name]
        command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
        command.append(f"http://127.0.0.1:{server.port}{_PATH}")
        subprocess.run(command, check=True, capture_output=True)
    return server.counts(load.model).since(before)


def main() -> None:
    """Print a line for each load."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", type=Path, help="directory that make_bench_models.py has filled")
    parser.add_argument("--roles", default="front-ends", choices=("front-ends", "workers"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=3)
    options = parser.parse_args()
    server = start(options.models, options.roles, options.processes)
    try:
        for load in LOADS:
            ask(server, load, 1)
            before, began = server.seconds(), time.monotonic()
            counts = ask(server, load, options.seconds)
            count = counts.requests
            took = time.monotonic() - began
            each = {
                part: (seconds - before[part]) / count * 1e6
                for part, seconds in server.seconds().items()
            }
            whole = sum(each.values())
            shown = ", ".join(f"{part} {micros:.2f} us" for part, micros in each.items())
            executing = counts.executing_seconds / count * 1e6
            shown += f", executing {executing:.2f} us in batches of {count / counts.executions:.1f}"
            if "engine" in each:
                shown += f", engine {each['engine'] / whole:.0%}"
            shape = ",".join(map(str, load.shape))
            print(
                f"{load.model} FP32[{shape}] {' '.join(load.arguments)}: "
                f"{count / took:.0f}/s, {whole:.2f} us a request: {shown}",
                flush=True,
            )
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait()


if __name__ == "__main__":
    main()
