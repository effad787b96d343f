"""Measure many clients that connect at the same time, each with a request of 10 KB.

    python tools/connects.py [--connections 10000] [--seconds 5] [--processes 1,2]

Connections are opened at a fixed rate, from several loopback addresses; each sends a ModelInfer of
10 KB over gRPC once connected, and stays open until the last one is answered. Latency is measured
from the time a connection was due. Meanwhile a client with an open connection sends 100 requests
per second. The clients run in two processes. Exits with 1 if a connection was refused, broke or got
no answer.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from typing import cast

import uvloop

from comparison import processes
from comparison.open_loop import open_loop
from comparison.varying import FORMS, GREETING, Http2Speaker, Load, grpc_requests

_CLIENTS = 2
_ADDRESSES = 16
"""Addresses that clients connect from: each offers about 28,000 ports."""
_BYSTANDER_RATE = 100
_START_SECONDS = 300.0
_ANSWER_SECONDS = 30.0
"""Timeout for the last answers."""
_FILES = 1024
_READY = {1: "started"}
"""Log event of readiness by number of processes; with several it is another one."""


def message(size: int) -> bytes:
    """Return a ModelInfer of FP32[1, size / 4] with the gRPC prefix."""
    shape = _varint(1) + _varint(size // 4)
    tensor = b"".join((_of(1, b"x"), _of(2, b"FP32"), _of(3, shape)))
    whole = _of(1, b"m") + _of(5, tensor) + _of(7, bytes(size))
    return struct.pack(">BI", 0, len(whole)) + whole


def _varint(value: int) -> bytes:
    octets = bytearray()
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*octets, value))


def _of(number: int, octets: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + _varint(len(octets)) + octets


@dataclass(slots=True)
class Seen:
    """The result of one client process."""

    connected: list[float] = field(default_factory=list)
    """Seconds until each connection was established."""
    answered: list[float] = field(default_factory=list)
    """Seconds until each connection had its answer."""
    failed: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Share:
    """The connections of one client process."""

    port: int
    octets: bytes
    due: Sequence[float]
    """Due time of each connection, in seconds from the start."""


class _Client(asyncio.Protocol):
    def __init__(self, octets: bytes) -> None:
        self._octets = octets
        self._speaker = Http2Speaker()
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._octets)

    def data_received(self, data: bytes) -> None:
        try:
            ended = self._speaker.answered(data)
        except ValueError as error:
            self._end(error)
            return
        if reply := self._speaker.reply():
            self._transport.write(reply)
        if ended and not self.answered.done():
            is_whole = self._speaker.data_bytes > len(self._octets) // 2
            self._end(None if is_whole else ValueError("answered with an error"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionError("closed"))

    def _end(self, error: Exception | None) -> None:
        if not self.answered.done():
            if error is None:
                self.answered.set_result(None)
            else:
                self.answered.set_exception(error)
                # Mark the exception as retrieved, in case nobody awaits the future.
                self.answered.exception()


def connect(share: Share, begun: Barrier) -> Seen:
    """Open the connections of one process, and return their results."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, len(share.due) + _FILES), hard))
    begun.wait()
    return uvloop.run(_connect_all(share))


async def _connect_all(share: Share) -> Seen:
    seen, tasks, start = Seen(), [], time.monotonic()
    kept: list[asyncio.BaseTransport] = []
    for number, after in enumerate(share.due):
        due = start + after
        if (left := due - time.monotonic()) > 0:
            await asyncio.sleep(left)
        tasks.append(asyncio.ensure_future(_connect_one(share, number, due, seen, kept)))
    await asyncio.gather(*tasks)
    for transport in kept:
        transport.close()
    return seen


async def _connect_one(
    share: Share, number: int, due: float, seen: Seen, kept: list[asyncio.BaseTransport]
) -> None:
    here = (f"127.0.1.{1 + number % _ADDRESSES}", 0)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            transport, client = await loop.create_connection(
                lambda: _Client(share.octets), "127.0.0.1", share.port, local_addr=here
            )
            kept.append(transport)
            seen.connected.append(time.monotonic() - due)
            await client.answered
            seen.answered.append(time.monotonic() - due)
    except (OSError, TimeoutError, ValueError) as error:
        seen.failed[f"{type(error).__name__}: {error}"[:80]] += 1


def _bystander(load: Load, seconds: float, begun: Barrier) -> Sequence[float]:
    begun.wait()
    return open_loop(load, _BYSTANDER_RATE, seconds)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    pid: int
    port: int


@contextmanager
def serving(folder: Path, count: int, flags: Sequence[str]) -> Iterator[Server]:
    """Serve an identity model with `count` processes for the duration of a block."""
    _write_model(folder / "models")
    log = folder / "log"
    several = () if count == 1 else ("--processes", str(count))
    command = (
        *(sys.executable, "-m", "xlaserve.cli", "serve", str(folder / "models"), "--device", "cpu"),
        *("--grpc-endpoint", "port:0", "--http-endpoint", "none", *several, *flags),
    )
    with log.open("w") as written:
        process = subprocess.Popen(command, stderr=written)
    try:
        yield Server(process.pid, _port(log, process, _READY.get(count, "workers ready")))
    finally:
        process.terminate()
        process.wait()


def _write_model(root: Path) -> None:
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    config = {
        "backend": "identity",
        "max_batch_size": 64,
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
    }
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "config.json").write_text(json.dumps(config))


def _port(log: Path, process: "subprocess.Popen[bytes]", is_ready: str) -> int:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        records = [json.loads(line) for line in log.read_text().splitlines() if line[:1] == "{"]
        if any(one["event"] == is_ready for one in records):
            found = next(one for one in records if one["event"] == "listening")
            return int(found["grpc"].rpartition(":")[2])
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start: {log.read_text()}")


def _request(port: int, body: bytes) -> bytes:
    (one,) = grpc_requests([[]], FORMS["indexed"], body, port)
    return GREETING + one


def _line(name: str, seconds: Sequence[float]) -> str:
    if len(seconds) < 2:
        return f"  {name}: {len(seconds)}"
    ms = sorted(1000 * one for one in seconds)
    p99 = statistics.quantiles(ms, n=100)[98]
    return f"  {name}: p50 {statistics.median(ms):.1f} ms, p99 {p99:.1f}, at most {ms[-1]:.1f}"


def measure(server: Server, count: int, seconds: float, size: int) -> bool:
    """Print the results of all connections; tell whether all were answered."""
    few = [[("x-request-id", str(number))] for number in range(int(2 * seconds * _BYSTANDER_RATE))]
    requests = grpc_requests(few, FORMS["literal"], message(64), server.port)
    load = Load(server.port, requests, Http2Speaker, GREETING, 1, 1)
    before = processes.resident_bytes(server.pid)
    processes.reset_peak(server.pid)
    used = {pid: _cpu(pid) for pid in processes.tree(server.pid)}
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager:
        begun = manager.Barrier(_CLIENTS + 1)
        with ProcessPoolExecutor(_CLIENTS + 1, spawn) as pool:
            due = [seconds * number / count for number in range(count)]
            octets = _request(server.port, message(size))
            shares = [Share(server.port, octets, due[at::_CLIENTS]) for at in range(_CLIENTS)]
            clients = [pool.submit(connect, share, begun) for share in shares]
            beside = pool.submit(_bystander, load, seconds + 1, begun)
            found = [one.result() for one in clients]
            latencies = beside.result()
    connected = [one for seen in found for one in seen.connected]
    answered = [one for seen in found for one in seen.answered]
    failed = sum((seen.failed for seen in found), Counter[str]())
    print(_line("connected", connected))
    print(_line("answered", answered))
    print(_line("the other client", latencies))
    ran = sorted((_cpu(pid) - was for pid, was in used.items()), reverse=True)
    print(f"  processor seconds of its processes: {', '.join(f'{one:.2f}' for one in ran)}")
    grown = (processes.peak_bytes(server.pid) - before) / count / 1024
    print(f"  memory of each: {grown:.1f} KiB")
    for reason, times in failed.most_common(5):
        print(f"  failed: {times} {reason}")
    return len(answered) == count


def _cpu(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Parse the arguments, and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--bytes", type=int, default=10_240)
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("flags", nargs="*", help="of the server, behind --")
    given = parser.parse_args()
    fine = True
    for count in map(int, given.processes.split(",")):
        load = os.getloadavg()[0]
        print(f"{given.connections} in {given.seconds:g} s, {count} processes, load {load:.1f}")
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(Path(folder), count, given.flags) as server,
        ):
            fine &= measure(server, given.connections, given.seconds, given.bytes)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
