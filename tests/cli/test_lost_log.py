"""Processes that cannot write their log or their output."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from support import mesh
from support.process import ENVIRONMENT, START_SECONDS, STOP_SECONDS, command

from xlaserve.dialing.interface import CallFailed
from xlaserve.dialing.over_grpc import Client

pytestmark = pytest.mark.slow


def full() -> int:
    """Open a device that is full."""
    return os.open("/dev/full", os.O_WRONLY)


def deserted() -> int:
    """Open a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def stalled() -> int:
    """Open a full pipe whose reader does not read."""
    # Opened for both directions, it is its own reader.
    reader, writer = os.pipe()
    both = os.open(f"/proc/self/fd/{writer}", os.O_RDWR | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(both, b"." * 1024)
    os.set_blocking(both, True)
    os.close(reader)
    os.close(writer)
    return both


@asynccontextmanager
async def served(
    repository: Path, lost: Callable[[], int], *flags: str
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Run a server whose log is not read; yields once it is ready."""
    url = f"unix:{repository.parent}/grpc.sock"
    arguments = ("serve", str(repository), "--grpc-endpoint", url, "--http-endpoint", "none")
    out, err = full(), lost()
    process = await asyncio.create_subprocess_exec(
        *command(*arguments, "--device", "cpu", "--log-level", "debug", *flags),
        stdout=out,
        stderr=err,
        env=os.environ | ENVIRONMENT,
    )
    os.close(out)
    os.close(err)
    try:
        async with asyncio.timeout(START_SECONDS):
            while not await is_ready(url):
                assert process.returncode is None
                await asyncio.sleep(0.05)
        yield url, process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def is_ready(url: str) -> bool:
    try:
        async with Client(url, timeout=5) as client:
            return await client.ready()
    except CallFailed:
        return False


async def stopped(process: asyncio.subprocess.Process) -> int:
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(STOP_SECONDS):
        return await process.wait()


def call(channel: grpc.aio.Channel, method: str, name: str) -> grpc.aio.UnaryUnaryCall:
    kind = f"inference.RepositoryModel{method}"
    made = channel.unary_unary(
        f"/inference.GRPCInferenceService/RepositoryModel{method}",
        request_serializer=mesh.messages().named(f"{kind}Request").SerializeToString,
        response_deserializer=mesh.messages().named(f"{kind}Response").FromString,
    )
    return made(mesh.message(f"{kind}Request", model_name=name))


@pytest.fixture(name="repository")
def _repository(example_models: Path, tmp_path: Path) -> Path:
    shutil.copytree(example_models / "identity", tmp_path / "models" / "identity")
    return tmp_path / "models"


async def test_loads_and_unloads_answer_as_usual(repository: Path) -> None:
    flags = ("--model-control-mode", "explicit")
    async with (
        served(repository, stalled, *flags) as (url, process),
        grpc.aio.insecure_channel(url) as channel,
    ):
        outcomes = [
            await mesh.code(call(channel, method, name))
            for method, name in [("Load", "identity"), ("Load", "none"), ("Unload", "identity")]
        ]

        assert ["OK", "NOT_FOUND", "OK"] == outcomes
        assert 0 == await stopped(process)


async def test_a_polled_repository_is_followed(repository: Path) -> None:
    flags = ("--model-control-mode", "poll", "--poll-interval-seconds", "0.05")
    async with served(repository, deserted, *flags) as (url, process):
        (repository / "loop").symlink_to("loop")
        shutil.copytree(repository / "identity", repository / "another")
        async with asyncio.timeout(START_SECONDS):
            while not await has(url, "another"):
                await asyncio.sleep(0.05)

        assert 0 == await stopped(process)


async def has(url: str, model: str) -> bool:
    try:
        async with Client(url, timeout=5) as client:
            return bool(await client.inputs(model))
    except CallFailed:
        return False


async def test_a_mesh_gets_its_answers(repository: Path) -> None:
    flags = ("--modelmesh", "--model-root", str(repository))
    async with (
        served(repository, full, *flags) as (url, process),
        mesh.dial(url) as sidecar,
    ):
        await sidecar.status()
        # Sequentially: an unload cancels a load in progress.
        loaded = await mesh.code(sidecar.load("m", repository / "identity"))
        failed = await mesh.code(sidecar.load("n", repository / "none"))
        unloaded = await mesh.code(sidecar.unload("m"))

        assert ["OK", "FAILED_PRECONDITION", "OK"] == [loaded, failed, unloaded]
        assert 0 == await stopped(process)


@pytest.mark.parametrize(
    ("arguments", "stdout", "stderr", "status", "said"),
    [
        (("--help",), full, None, 1, "error: output: No space left on device\n"),
        (("--help",), deserted, None, 1, ""),
        (("--help",), None, full, 0, ""),
        (("health", "--url", "unix:nowhere"), full, full, 1, ""),
        (("health", "--url", "unix:nowhere"), deserted, deserted, 1, ""),
    ],
)
async def test_a_command_ends_as_it_should(
    arguments: tuple[str, ...],
    stdout: Callable[[], int] | None,
    stderr: Callable[[], int] | None,
    status: int,
    said: str,
) -> None:
    """An output that cannot be written is a one-line error, unless its reader has gone."""
    out, err = (make() if make else asyncio.subprocess.PIPE for make in (stdout, stderr))
    process = await asyncio.create_subprocess_exec(*command(*arguments), stdout=out, stderr=err)
    _, told = await process.communicate()

    for descriptor in (out, err):
        if descriptor != asyncio.subprocess.PIPE:
            os.close(descriptor)

    assert status == process.returncode
    assert said == (told or b"").decode()


async def test_closed_standard_streams_are_no_error(tmp_path: Path) -> None:
    """A socket must not become stderr, to which libraries of the process print."""
    code = (
        "import os; os.closerange(0, 3)\n"
        "from xlaserve.process.best_effort import open_standard_streams as opened\n"
        "opened(); opened()\n"
        f"os._exit(0 if os.open({str(tmp_path)!r}, os.O_RDONLY) > 2 else 1)"
    )
    process = await asyncio.create_subprocess_exec(command()[0], "-c", code)

    assert 0 == await process.wait()


async def test_what_a_library_says_on_a_full_stderr_changes_nothing() -> None:
    code = """
import sys
from xlaserve import build, cli
known = build.version
def version():
    print("deprecated", file=sys.stderr, flush=True)
    return known()
build.version = version
sys.argv = ["xlaserve", "--version"]
cli.main()
"""
    stderr = full()
    process = await asyncio.create_subprocess_exec(
        command()[0], "-c", code, stdout=asyncio.subprocess.PIPE, stderr=stderr
    )
    out, _ = await process.communicate()
    os.close(stderr)

    assert 0 == process.returncode
    assert out.startswith(b"xlaserve ")
