"""systemd integration: notifications, the watchdog, and socket activation."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc.aio
import pytest
from support import tools
from support.conditions import until
from support.process import ENVIRONMENT, START_SECONDS, command

from xlaserve.errors import InvalidSettings
from xlaserve.process.systemd import Systemd

LIVE, ALIVE = "/inference.GRPCInferenceService/ServerLive", b"\x08\x01"
SECONDS = 60
UNITS = Path(__file__).resolve().parent.parent / "deploy" / "systemd"
ADOPT = """
import os, sys
numbers = [int(number) for number in sys.argv[1].split(",")]
copies = [os.dup(os.dup(os.dup(number))) for number in numbers]
for place, copy in enumerate(copies):
    os.dup2(copy, 3 + place)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Moves descriptors to where systemd puts them, then executes another program."""


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket that systemd listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(f"{tmp_path}/notify")
        found.setblocking(False)
        yield found


def lines(heard: socket.socket) -> list[str]:
    """Return the messages since the last call."""
    found = []
    with suppress(BlockingIOError):
        while True:
            found += heard.recv(1 << 16).decode().splitlines()
    return found


def test_it_is_told_how_things_go(heard: socket.socket, tmp_path: Path) -> None:
    environment = {"NOTIFY_SOCKET": f"{tmp_path}/notify", "HOME": "/"}
    systemd = Systemd.of(environment)
    # A SIGHUP during startup, which continues.
    systemd.reloads(True)
    systemd.reloads(False)
    assert [] == lines(heard)
    systemd.ready()
    systemd.reloads(True)
    systemd.reloads(False)
    systemd.stopping()
    said = lines(heard)

    assert ["READY=1", "RELOADING=1", "READY=1", "STOPPING=1"] == [
        line for line in said if not line.startswith("MONOTONIC_USEC=")
    ]
    assert len(said) == 5
    # The variables are removed, so that model processes do not inherit them.
    assert {"HOME": "/"} == environment


def test_an_abstract_socket_is_heard_too() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind("\0" + (name := f"xlaserve-test-{os.getpid()}"))
        Systemd(f"@{name}").ready()

        assert b"READY=1" == heard.recv(100)


@pytest.mark.parametrize("path", ["", "/nothing/here"])
def test_without_anybody_who_listens_nothing_happens(path: str) -> None:
    Systemd(path).ready()


async def test_the_watchdog_hears_of_the_event_loop(heard: socket.socket, tmp_path: Path) -> None:
    path = f"{tmp_path}/notify"
    given = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid())}
    task = asyncio.ensure_future(Systemd.of(dict(given)).keep_alive())
    said: list[str] = []

    def heard_more() -> bool:
        said.extend(lines(heard))
        return len(said) > 2

    await until(heard_more)
    task.cancel()
    other = Systemd.of(given | {"WATCHDOG_PID": "1"})
    await other.keep_alive()

    assert {"WATCHDOG=1"} == set(said)
    assert 0 == other.watchdog_seconds


@pytest.mark.parametrize("variable", ["WATCHDOG_USEC", "LISTEN_FDS"])
def test_what_systemd_would_not_write_is_refused(variable: str) -> None:
    with pytest.raises(InvalidSettings, match=variable):
        Systemd.of({variable: "many", "LISTEN_PID": str(os.getpid())})


def test_sockets_for_another_process_are_left_alone() -> None:
    """The first process passes them on to its children."""
    with pytest.raises(InvalidSettings, match="one socket of systemd"):
        Systemd.of({"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "a"}).take_socket(
            "http_endpoint", "a"
        )


def test_a_socket_is_one_that_listens_and_has_a_name_of_its_own() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        numbers = {"a": [os.dup(listening.fileno())], "b": [os.dup(datagrams.fileno())]}
        systemd = Systemd(sockets=numbers | {"c": [1, 2]})
        with systemd.take_socket("http_endpoint", "a") as taken:
            assert listening.getsockname() == taken.getsockname()
        for name, expected in {"b": "ListenStream", "c": "got '2", "a": "got '0"}.items():
            with pytest.raises(InvalidSettings, match=expected):
                systemd.take_socket("http_endpoint", name)


@pytest.mark.slow
async def test_a_service_with_sockets_of_systemd(heard: socket.socket, tmp_path: Path) -> None:
    """It reports readiness, reload and stop, and leaves the sockets in place."""
    (tmp_path / "models").mkdir()
    with (
        socket.create_server(("127.0.0.1", 0)) as http,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.bind(f"{tmp_path}/grpc.sock")
        unix.listen()
        given = (http.fileno(), unix.fileno())
        flags = ("--grpc-endpoint", "systemd:grpc", "--http-endpoint", "systemd:http")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ADOPT, ",".join(map(str, given))),
            *command("serve", str(tmp_path / "models"), *flags, "--device", "cpu"),
            pass_fds=given,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ
            | ENVIRONMENT
            | {"NOTIFY_SOCKET": f"{tmp_path}/notify", "WATCHDOG_USEC": "1000000"}
            | {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "http:grpc"},
        )
        said: list[str] = []

        async def hear(word: str, times: int = 1) -> None:
            async with asyncio.timeout(START_SECONDS):
                while said.count(word) < times:
                    said.extend(lines(heard))
                    await asyncio.sleep(0.01)

        try:
            await hear("READY=1")
            async with grpc.aio.insecure_channel(f"unix:{tmp_path}/grpc.sock") as channel:
                live = await channel.unary_unary(LIVE)(b"", timeout=SECONDS)
            reader, writer = await asyncio.open_connection(*http.getsockname())
            writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = await reader.readline()
            writer.close()
            process.send_signal(signal.SIGHUP)
            await hear("READY=1", 2)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(SECONDS):
                status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        said.extend(lines(heard))
        # Connections made now wait for the next start.
        for address, kind in (
            (http.getsockname(), socket.AF_INET),
            (f"{tmp_path}/grpc.sock", socket.AF_UNIX),
        ):
            with socket.socket(kind) as later:
                later.settimeout(SECONDS)
                later.connect(address)

    assert (ALIVE, b"HTTP/1.1 200 OK\r\n", 0) == (live, answer, status)
    assert ["READY=1", "RELOADING=1", "READY=1", "STOPPING=1"] == [
        line for line in said if line.split("=")[0] in ("READY", "RELOADING", "STOPPING")
    ]
    assert "WATCHDOG=1" in said


def test_the_units_are_understood(tmp_path: Path) -> None:
    """Verified by systemd itself, if installed, with an existing program."""
    analyze = tools.program("systemd-analyze")
    for unit in UNITS.iterdir():
        (tmp_path / unit.name).write_text(unit.read_text())
    done = subprocess.run(
        [analyze, "verify", "--man=no", *map(str, sorted(tmp_path.glob("xlaserve*")))],
        capture_output=True,
        text=True,
        check=False,
    )

    assert "" == "".join(line for line in done.stderr.splitlines() if "xlaserve" in line)


def test_the_service_is_shielded() -> None:
    """As far as a server with a GPU and a compiler can be, by systemd's own measure of 0 to 10."""
    analyze = tools.program("systemd-analyze")
    service = UNITS / "xlaserve.service"
    done = subprocess.run(
        [analyze, "security", "--offline=true", "--threshold=25", str(service)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == done.returncode, done.stdout


def test_the_units_name_what_the_server_is_told() -> None:
    service = (UNITS / "xlaserve.service").read_text()
    names = {
        line.removeprefix("FileDescriptorName=")
        for unit in UNITS.glob("*.socket")
        for line in unit.read_text().splitlines()
        if line.startswith("FileDescriptorName=")
    }

    assert {"grpc", "http"} == names
    assert all(f"--{name}-endpoint systemd:{name}" in service for name in names)
