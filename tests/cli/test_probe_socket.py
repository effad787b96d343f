"""`xlaserve health` over the probe socket, which needs no client credentials."""

import asyncio
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import trustme
import typer
from structlog.testing import capture_logs
from support.server import Serve
from support.tls import write_certificate
from typer.testing import CliRunner

from xlaserve.app.probe import probed
from xlaserve.cli.health import health
from xlaserve.settings.description import describe_settings

RULES = """
[[caller]]
name = "only-infers"
tls = ["DNS:client.example"]
allow = ["infer"]
"""
VARIABLES = {row.name: row.variable for row in describe_settings()}
AUTHORITY = trustme.CA()


@pytest.fixture(name="files")
def files_of_tls(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "ca.pem").write_bytes(AUTHORITY.cert_pem.bytes())
    return write_certificate(AUTHORITY, tmp_path)


@pytest.fixture(params=["unix", "clear", "tls", "mtls", "rules"])
def settings(
    request: pytest.FixtureRequest, tmp_path: Path, files: dict[str, str]
) -> dict[str, Any]:
    """Settings of a server that admits no client, or only clients with credentials."""
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    clients = {"tls_client_ca": str(tmp_path / "ca.pem")}
    return {
        "unix": {"grpc_endpoint": f"unix:{tmp_path / 'grpc.sock'}"},
        "clear": {},
        "tls": files,
        "mtls": files | clients,
        "rules": {**files, **clients, "access_rules": str(rules)},
    }[request.param]


def probe(socket: Path, *flags: str, url: str = "127.0.0.1:9") -> tuple[int, str]:
    """Run the command with the environment of the server's container; the URL is unreachable."""
    application = typer.Typer()
    application.command()(health)
    environment = {VARIABLES["probe_socket"]: str(socket), VARIABLES["grpc_endpoint"]: url}
    result = CliRunner().invoke(application, list(flags), env=environment)
    return result.exit_code, result.output if result.exception is None else str(result.exception)


async def test_a_probe_needs_nothing_that_clients_need(
    serve: Serve, tmp_path: Path, settings: dict[str, Any]
) -> None:
    socket = tmp_path / "probe.sock"
    async with serve(tmp_path, probe_socket=str(socket), **settings):
        live = await asyncio.to_thread(probe, socket, "--live")
        ready = await asyncio.to_thread(probe, socket)
        mode = stat.S_IMODE(socket.stat().st_mode)

    assert (0, f"unix:{socket}: live\n") == live
    assert (0, f"unix:{socket}: ready\n") == ready
    assert 0o600 == mode
    assert not socket.exists()


async def test_what_starts_or_drains_is_live_and_not_ready(tmp_path: Path) -> None:
    socket = tmp_path / "probe.sock"
    async with probed(str(socket), lambda: False):
        live = await asyncio.to_thread(probe, socket, "--live")
        ready = await asyncio.to_thread(probe, socket)

    assert (0, f"unix:{socket}: live\n") == live
    assert (1, f"unix:{socket}: the server is not ready") == ready


async def test_an_address_on_the_command_line_goes_before_the_socket(tmp_path: Path) -> None:
    socket, url = tmp_path / "probe.sock", f"unix:{tmp_path / 'nobody'}"
    async with probed(str(socket), lambda: True):
        given = await asyncio.to_thread(probe, socket, "--url", url)

    assert given[1].startswith(f"{url}: cannot connect")


async def test_without_the_socket_the_endpoint_is_asked(tmp_path: Path) -> None:
    """As when its directory is not writable: the server runs, and logs it."""
    socket, url = tmp_path / "nowhere" / "probe.sock", f"unix:{tmp_path / 'nobody'}"
    with capture_logs() as log:
        async with probed(str(socket), lambda: True):
            asked = await asyncio.to_thread(probe, socket, url=url)

    assert asked[1].startswith(f"{url}: cannot connect")
    assert [("probe socket not created", "No such file or directory")] == [
        (record["event"], record["reason"]) for record in log
    ]


async def test_a_server_that_is_replaced_leaves_the_socket_of_the_new_one(tmp_path: Path) -> None:
    socket = tmp_path / "probe.sock"
    async with probed(str(socket), lambda: True):
        async with probed(str(socket), lambda: False):
            before = probed(str(socket), lambda: True)
            await before.__aenter__()
        found = await asyncio.to_thread(probe, socket)
    there = socket.exists()
    await before.__aexit__(None, None, None)

    assert (0, f"unix:{socket}: ready\n") == found
    assert there
    assert [] == [name for name in os.listdir(tmp_path) if "probe" in name]  # noqa: PTH208


async def test_a_server_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    path = tmp_path / "silent.sock"
    async with await asyncio.start_unix_server(listen, path):
        found = await asyncio.to_thread(probe, path, "--timeout", "0.05")

    assert (1, f"unix:{path}: no answer in time") == found
