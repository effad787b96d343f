"""Servers started without standard streams, or by a user without a home directory."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.conditions import MOST_SECONDS
from support.process import ENVIRONMENT, STOP_SECONDS, command

from xlaserve.dialing.interface import CallFailed
from xlaserve.dialing.over_grpc import Client

CLOSED = {
    "stdin": "0<&-",
    "stdout": "1>&-",
    "stderr": "2>&-",
    "all": "0<&- 1>&- 2>&-",
}
HOMELESS = """
import pwd, sys
def getpwuid(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = getpwuid
from xlaserve.cli import main
main()
"""
"""As in a container whose user has no passwd entry."""


def flags(tmp_path: Path) -> list[str]:
    (tmp_path / "models").mkdir()
    return [
        *("serve", str(tmp_path / "models"), "--model-control-mode", "explicit"),
        *("--grpc-endpoint", f"unix:{tmp_path}/s", "--http-endpoint", "none", "--device", "cpu"),
    ]


async def ready(process: asyncio.subprocess.Process, socket: Path) -> bool:
    """Wait until a server is ready or has exited; tell which."""
    async with asyncio.timeout(MOST_SECONDS):
        while process.returncode is None:
            with suppress(CallFailed, OSError):
                async with Client(f"unix:{socket}", timeout=MOST_SECONDS) as client:
                    if await client.ready():
                        return True
            await asyncio.sleep(0.02)
    return False


async def stopped(process: asyncio.subprocess.Process) -> int | None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(STOP_SECONDS):
        return await process.wait()


@pytest.mark.parametrize(
    ("which", "processes"),
    [
        ("all", 1),
        *(pytest.param(which, 1, marks=pytest.mark.slow) for which in CLOSED if which != "all"),
        pytest.param("all", 2, marks=pytest.mark.slow),
    ],
)
async def test_a_server_starts_without_standard_streams(
    tmp_path: Path, which: str, processes: int
) -> None:
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", f'exec "$@" {CLOSED[which]}', "sh"),
        *command(*flags(tmp_path), "--processes", str(processes)),
        env=os.environ | ENVIRONMENT,
    )
    was_ready = await ready(process, tmp_path / "s")

    assert (True, 0) == (was_ready, await stopped(process))


async def test_a_server_starts_for_a_user_without_a_home(tmp_path: Path) -> None:
    """Its programs are not cached, as the log says; a model cache needs an explicit directory."""
    environment = {name: text for name, text in os.environ.items() if name != "HOME"}
    for name, text in ENVIRONMENT.items():
        if "CACHE" not in name:
            environment[name] = text
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOMELESS, *flags(tmp_path)),
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    log = asyncio.ensure_future(process.stderr.read())
    was_ready = await ready(process, tmp_path / "s")

    assert (True, 0) == (was_ready, await stopped(process))
    assert b"compiled programs not kept" in await log


async def test_a_cache_of_models_needs_a_directory_where_there_is_no_home(tmp_path: Path) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "HOME"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOMELESS, "serve", "s3://bucket/models", "--remote-schemes", "s3"),
        *("--grpc-endpoint", f"unix:{tmp_path}/s", "--http-endpoint", "none"),
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(STOP_SECONDS):
        _, told = await process.communicate()

    assert 1 == process.returncode
    assert (
        "error: setting remote_cache_directory: expected a directory, since the server's user has"
        " no home (HOME is not set), got 'auto'\n"
    ) == told.decode().splitlines(keepends=True)[-1]
