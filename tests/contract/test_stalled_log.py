"""A stalled log reader delays nothing, and later gets all messages."""

import asyncio
import json
import os
import signal
import socket
import threading
from pathlib import Path

import pytest
from support.process import ENVIRONMENT, START_SECONDS, command

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
