"""A server under attack, in its own process, and a client that must not suffer."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

import xlaserve
from support.process import ENVIRONMENT, START_SECONDS, command
from support.resident import Resident

ECHOED_BYTES = 1024
WIDE_BYTES = 2 << 20
_EVERY_SECONDS = 0.02
_STOP_SECONDS = 30


@dataclass(frozen=True)
class Target(Resident):
    """The server under attack."""

    url: str

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its processes."""
        times = [one.cpu_times() for one in self.all]
        return float(sum(one.user + one.system for one in times))


def export_models(folder: Path) -> None:
    """Write the models `echo`, and `wide`, which returns two megabytes for a number."""
    xlaserve.export_model(
        lambda params, x: {"y": x},
        {},
        {"x": ("FP32", [-1, ECHOED_BYTES // 4])},
        folder / "echo" / "1",
        max_batch_size=2,
    )
    weights = {"w": np.ones((1, WIDE_BYTES // 4), np.float32)}
    xlaserve.export_model(
        lambda params, x: {"y": x + params["w"]},
        weights,
        {"x": ("FP32", [-1, 1])},
        folder / "wide" / "1",
        max_batch_size=1,
    )


@contextmanager
def target(folder: Path, *flags: str) -> Iterator[Target]:
    """Serve the models of a folder; the log is written there."""
    log = folder / "log"
    arguments = ("serve", str(folder / "models"), "--grpc-endpoint", "port:0")
    with log.open("w") as written:
        process = subprocess.Popen(
            [*command(*arguments), "--http-endpoint", "none", "--device", "cpu", *flags],
            stderr=written,
            env=os.environ | ENVIRONMENT,
        )
        try:
            is_ready = "workers ready" if "--processes" in flags else "started"
            url, workers = _started(log, process, is_ready)
            found = [psutil.Process(pid) for pid in workers]
            yield Target(psutil.Process(process.pid), url, workers=found)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            finally:
                process.kill()


def _started(log: Path, process: "subprocess.Popen[bytes]", is_ready: str) -> tuple[str, list[int]]:
    """Wait until a server is ready; return its address and the ids of its workers."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        events: dict[str, list[dict[str, Any]]] = {}
        for line in log.read_text().splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                events.setdefault(record.get("event"), []).append(record)
        if is_ready in events:
            workers = [int(one["pid"]) for one in events.get("worker started", ())]
            return str(events["listening"][0]["grpc"]), workers
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {log.read_text()}")


def infer_request(model: str, values: int) -> bytes:
    """Return a serialized request for one of the models."""
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[bytes(4 * values)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, values])
    return bytes(request.SerializeToString())


class Victim:
    """A client that calls `echo` every 20 ms on its own connection."""

    def __init__(self, url: str) -> None:
        self.calls = 0
        self.worst_seconds = 0.0
        self.errors: list[str] = []
        self._url = url
        self._stop = threading.Event()
        self._was_answered = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Victim":
        """Wait for the first answer, so that the client is connected before the attackers."""
        self._thread.start()
        self._was_answered.wait(_STOP_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        request = pb.ModelInferRequest.FromString(infer_request("echo", ECHOED_BYTES // 4))
        with grpc.insecure_channel(self._url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    # The server may refuse new connections until dropped ones are gone.
                    is_first = not self.calls
                    stub.ModelInfer(request, timeout=_STOP_SECONDS, wait_for_ready=is_first)
                except grpc.RpcError as error:
                    self.errors.append(str(error))
                self._was_answered.set()
                self.calls += 1
                self.worst_seconds = max(self.worst_seconds, time.monotonic() - began)
                self._stop.wait(_EVERY_SECONDS)
