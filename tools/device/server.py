"""`xlaserve serve` in a separate process, and a client for it."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from device.findings import Findings
from device.place import Place
from xlaserve.dialing.over_grpc import Client

_END_SECONDS = 30
_LOG_BYTES = 300_000
FLOP_PER_ROW = {"bert_bf16": 22.4e9, "resnet50_bf16": 8.2e9}
"""Floating-point operations per row of the full-size models."""


class Server:
    """A server for one repository; an asynchronous context manager."""

    def __init__(
        self,
        place: Place,
        findings: Findings,
        repository: Path,
        *arguments: str,
        cache: Path | None = None,
        seconds: float = 300,
        **environment: str,
    ) -> None:
        self._place = place
        self._findings = findings
        self._log = place.folder / f"server.{time.time_ns()}.log"
        self._seconds = seconds
        command = [sys.executable, "-m", "xlaserve", "serve", str(repository)]
        command += ["--device", place.device]
        command += ["--grpc-endpoint", "port:0", "--http-endpoint", "port:0"]
        command += ["--compilation-cache-directory", str(cache or place.cache), *arguments]
        # The step has JAX on the CPU; its server must not inherit that.
        inherited = {name: text for name, text in os.environ.items() if name != "JAX_PLATFORMS"}
        variables = {**inherited, "XLASERVE_LOG_LEVEL": "info", **environment}
        with self._log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, cwd=place.folder, env=variables
            )
        self.began = time.monotonic()
        self.ready_seconds = 0.0

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Return the records of these events in its log so far."""
        return [row for row in self._records() if row.get("event") in names]

    def warnings(self) -> list[dict[str, Any]]:
        """Return the warnings and errors of its log so far."""
        return [row for row in self._records() if row.get("level") in ("warning", "error")]

    def _records(self) -> Iterator[dict[str, Any]]:
        for line in self._log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row

    async def until(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until the log has `count` records of an event."""
        while len(found := self.events(event)) < count:
            if self.process.poll() is not None or time.monotonic() - self.began > self._seconds:
                said = self._log.read_text()[-1500:]
                raise RuntimeError(f"no '{event}' (ended with {self.process.poll()}): {said}")
            await asyncio.sleep(0.05)
        return found

    async def __aenter__(self) -> Self:
        try:
            (said,) = await self.until("listening")
            await self.until("started")
        except BaseException:
            self.stop()
            raise
        self.grpc, self.http = str(said["grpc"]), str(said["http"])
        self.ready_seconds = round(time.monotonic() - self.began, 2)
        self.client = Client(self.grpc, timeout=300)
        return self

    async def __aexit__(self, *failure: object) -> None:
        with contextlib.suppress(Exception):
            await self.client.__aexit__(None, None, None)
        self.stop()

    def stop(self) -> None:
        """Stop the server, and keep the end of its log."""
        if self.process.poll() is None:
            began = time.monotonic()
            self.process.terminate()
            try:
                self.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
            code, seconds = self.process.wait(), round(time.monotonic() - began, 2)
            self._findings.add("server ends", code=code, same=code == 0, seconds=seconds)
        with (Path(self._place.out) / "server.log").open("a") as file:
            file.write(f"--- {self._log.name}\n{self._log.read_text()[-_LOG_BYTES:]}\n")

    def bench(self, model: str, batch: int = 1, concurrency: str = "1", seconds: float = 2) -> None:
        """Run `xlaserve bench`, and write its measurements. Blocks."""
        path = self._place.folder / f"bench.{time.time_ns()}.json"
        seconds = 0.2 if self._place.quick else seconds
        command = [
            *(sys.executable, "-m", "xlaserve", "bench", model, "--url", self.grpc),
            *("--batch", str(batch), "--concurrency", concurrency, "--duration", f"{seconds}s"),
            *("--warmup", "100ms" if self._place.quick else "500ms", "--json", str(path)),
        ]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if not path.exists():
            raise RuntimeError(f"bench: {ran.stdout[-300:]} {ran.stderr[-500:]}")
        for one in json.loads(path.read_text())["steps"]:
            rows = one["answers_per_second"] * batch
            latency = {key: round(one["latency_ms"].get(key, 0), 3) for key in ("p50", "p99")}
            self._findings.add(
                f"grpc {model}", batch=batch, concurrency=one["concurrency"],
                rows_per_second=round(rows, 1), latency_ms=latency, errors=one["errors"],
                client_cpu=one["client_cpu"], **share(self._place, self._findings, model, rows),
            )  # fmt: skip


def share(place: Place, findings: Findings, model: str, rows_per_second: float) -> dict[str, float]:
    """Return the throughput relative to the matrix product of `env`; empty if unknown."""
    peak = findings.earlier("env", "matmul bfloat16").get("tflops")
    if place.quick or not peak or model not in FLOP_PER_ROW:
        return {}
    tflops = rows_per_second * FLOP_PER_ROW[model] / 1e12
    return {"tflops": round(tflops, 1), "of_peak": round(tflops / peak, 4)}
