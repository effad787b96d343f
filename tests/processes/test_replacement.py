"""SIGUSR2 replaces a server without clients noticing, with one process and with several."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from support import several
from support.process import ServerProcess, served
from support.replacing import MOST_SECONDS, ending


@asynccontextmanager
async def connecting(url: str) -> AsyncIterator[set[int]]:
    """Keep connecting clients during a block; yield the set of processes that answer them.

    The block fails if a client is refused or not answered.
    """
    found: set[int] = set()
    ended = asyncio.Event()

    async def connect() -> None:
        while not ended.is_set():
            async with aiohttp.ClientSession() as session:
                found.add(await several.asked(session, url))

    clients = [asyncio.ensure_future(connect()) for _ in range(4)]
    try:
        yield found
    finally:
        ended.set()
        await asyncio.gather(*clients)


async def answered_by_others(found: set[int], known: set[int]) -> None:
    while found <= known:
        await asyncio.sleep(0.01)


async def replaced(server: ServerProcess) -> None:
    """Replace a server while clients connect; return when the old one has ended."""
    known = set((await several.connections_of(server.http, 4)).keys())
    async with connecting(server.http) as found, asyncio.timeout(MOST_SECONDS):
        server.process.send_signal(signal.SIGUSR2)
        await server.until("server replaced")
        await several.is_gone(server.process.pid)
        await answered_by_others(found, known)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
async def test_a_replaced_server_loses_no_connection(tmp_path: Path, processes: int) -> None:
    """The new one inherits the sockets, and the old one drains once the new one is ready."""
    models, path = several.repository(tmp_path / "models"), tmp_path / "notify"
    flags = ("--processes", str(processes), "--allow-python-models")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        systemd.setblocking(False)
        async with served(models, *flags, NOTIFY_SOCKET=str(path)) as server:
            if processes > 1:
                await server.until(several.READY)
            async with ending(server):
                await replaced(server)
                new = server.event("replacement started")["pid"]
                said = []
                with suppress(BlockingIOError):
                    while True:
                        said.append(systemd.recv(1 << 10).decode())

    assert 0 == server.process.returncode
    assert f"MAINPID={new}" in said
    # By the old server; systemd hears nothing from the new one before.
    assert "STOPPING=1" not in said


@pytest.mark.slow
async def test_a_server_whose_replacement_fails_serves_on(tmp_path: Path) -> None:
    """A model that fails to load suffices; then the model is fixed."""
    models = several.repository(tmp_path / "models")
    code = models / "who" / "1" / "model.py"
    text = code.read_text()
    unix = tmp_path / "grpc.sock"
    flags = ("--allow-python-models", "--grpc-endpoint", f"unix:{unix}")
    async with served(models, *flags) as server, asyncio.timeout(MOST_SECONDS):
        async with ending(server):
            code.write_text("this is no Python")
            server.process.send_signal(signal.SIGUSR2)
            await server.until("server not replaced")
            reason = server.event("server not replaced")["reason"]
            async with aiohttp.ClientSession() as session:
                mine = await several.asked(session, server.http)
            assert unix.exists()
            code.write_text(text)
            await replaced(server)
            assert unix.exists()

    assert mine == server.process.pid
    assert "exit status 1 before it was ready" in reason


@pytest.mark.slow
async def test_a_server_that_ends_takes_its_unready_replacement_along(tmp_path: Path) -> None:
    """A server that is being stopped needs none; a second SIGUSR2 starts no second one."""
    gate = tmp_path / "hold"
    models = several.repository(tmp_path / "models")
    code = f"import pathlib, time\nwhile pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)\n"
    file = models / "who" / "1" / "model.py"
    async with served(models, "--allow-python-models") as server, asyncio.timeout(MOST_SECONDS):
        async with ending(server):
            gate.touch()
            file.write_text(code + file.read_text())
            server.process.send_signal(signal.SIGUSR2)
            await server.until("replacement started")
            server.process.send_signal(signal.SIGUSR2)
            await server.until("server not replaced")
            async with aiohttp.ClientSession() as session:
                mine = await several.asked(session, server.http)
            status = await server.stop()
            new = server.event("replacement started")["pid"]
            await several.is_gone(new)

    assert (0, server.process.pid) == (status, mine)
    assert f"process {new} is already replacing it" == server.event("server not replaced")["reason"]
