"""A stalled log reader delays nothing, and later gets all messages; lost ones are counted."""

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
import structlog
from support.http import ask
from support.process import ENVIRONMENT, START_SECONDS, command
from support.server import Serve

from xlaserve.process import log

SECONDS = 60


def fill(writer: int) -> int:
    """Fill a pipe; return the number of bytes written."""
    count = 0
    os.set_blocking(writer, False)
    try:
        while True:
            count += os.write(writer, b"." * 1024)
    except BlockingIOError:
        os.set_blocking(writer, True)
    return count


def ready(heard: socket.socket) -> None:
    """Wait until a server has notified readiness."""
    heard.settimeout(START_SECONDS)
    while b"READY=1" not in heard.recv(1 << 12):
        pass


async def start(tmp_path: Path, writer: int, heard: socket.socket) -> asyncio.subprocess.Process:
    heard.bind(f"{tmp_path}/notify")
    (tmp_path / "models").mkdir()
    endpoints = ("--grpc-endpoint", "port:0", "--http-endpoint", "none", "--device", "cpu")
    process = await asyncio.create_subprocess_exec(
        *command("serve", str(tmp_path / "models"), *endpoints),
        stderr=writer,
        env=os.environ | ENVIRONMENT | {"NOTIFY_SOCKET": f"{tmp_path}/notify"},
    )
    try:
        await asyncio.to_thread(ready, heard)
    except BaseException:
        process.kill()
        await process.wait()
        raise
    return process


@pytest.mark.slow
async def test_a_full_pipe_loses_nothing_and_holds_nothing_up(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    held = fill(writer)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        process = await start(tmp_path, writer, heard)
    os.close(writer)
    octets: list[bytes] = []

    def read() -> None:
        while more := os.read(reader, 1 << 16):
            octets.append(more)

    reading = threading.Thread(target=read)
    reading.start()
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(SECONDS):
        status = await process.wait()
        await asyncio.to_thread(reading.join)
    os.close(reader)
    log = [json.loads(line) for line in b"".join(octets)[held:].splitlines()]
    events = [record["event"] for record in log]

    assert 0 == status
    assert ["listening", "started", "shutting down", "stopped"] == [
        event for event in events if event in ("listening", "started", "shutting down", "stopped")
    ]
    assert not any("lost_before" in record for record in log)


@pytest.mark.slow
async def test_a_server_ends_though_nobody_reads_its_log(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    fill(writer)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        process = await start(tmp_path, writer, heard)
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(SECONDS):
        status = await process.wait()
    for end in (reader, writer):
        os.close(end)

    assert 0 == status


@pytest.fixture
def full() -> Iterator[TextIO]:
    with Path("/dev/full").open("w") as stream:
        yield stream


async def test_records_that_a_full_disk_loses_are_counted(
    serve: Serve, tmp_path: Path, full: TextIO
) -> None:
    """By a metric, which keeps its value once the disk has space again."""
    (tmp_path / "models").mkdir()
    async with serve(tmp_path / "models", http_endpoint="port:0") as server:
        log.configure("info", full)
        for _ in range(3):
            structlog.get_logger().info("lost")
        counts = [await lost_records(str(server.http))]
        with_space = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(with_space, full.fileno())
        os.close(with_space)
        structlog.get_logger().info("told")
        counts.append(await lost_records(str(server.http)))
    told = json.loads((tmp_path / "log").read_text().splitlines()[0])

    assert ["3", "3"] == counts
    assert ("told", 3) == (told["event"], told["lost_before"])


async def lost_records(url: str) -> str:
    lines = (await ask(url, "GET", "/metrics")).body.decode().splitlines()
    (found,) = [line for line in lines if line.startswith("xlaserve_log_records_lost_total ")]
    return found.split()[1]
