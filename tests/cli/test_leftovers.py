"""Processes killed halfway, and the cleanup by the next one."""

import asyncio
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from support import mesh
from support.process import STOP_SECONDS, served
from support.server import Serve

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"

HELD = """
import sys, time
from xlaserve.cli import main
from xlaserve.artifact import manifest

write = manifest.write

def hold(*arguments):
    write(*arguments)
    print("written", flush=True)
    time.sleep(600)

manifest.write = hold
main()
"""


@asynccontextmanager
async def exporting(target: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run an export that has written all its files, but not yet published them."""
    arguments = ("export", f"{EXAMPLES / 'plain_jax.py'}:model", str(target))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HELD, *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert b"written\n" == await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


async def ended(process: asyncio.subprocess.Process, number: int) -> int:
    process.send_signal(number)
    async with asyncio.timeout(STOP_SECONDS):
        return await process.wait()


async def test_an_export_that_is_ended_leaves_nothing_and_one_that_is_killed_not_for_long(
    tmp_path: Path, serve: Serve
) -> None:
    """The next start removes leftovers, but neither running exports nor user files."""
    root, scratch = tmp_path / "models", tmp_path / "scratch"
    scratch.mkdir()
    (root / "m" / ".digits.backup").mkdir(parents=True)
    async with exporting(root / "m") as killed, exporting(root / "m") as live:
        assert 3 == len(hidden(root / "m"))
        assert -signal.SIGKILL == await ended(killed, signal.SIGKILL)

        async with serve(root, scratch_directory=scratch):
            assert 2 == len(hidden(root / "m"))

        assert 128 + signal.SIGTERM == await ended(live, signal.SIGTERM)

    assert [".digits.backup"] == hidden(root / "m")


async def test_files_of_a_killed_server_are_removed_by_the_next(
    example_models: Path, tmp_path: Path, serve: Serve
) -> None:
    """Another running server with the same scratch directory keeps its files."""
    root, scratch = tmp_path / "models", tmp_path / "scratch"
    scratch.mkdir()
    shutil.copytree(example_models / "identity", root / "identity")
    flags = ("--model-control-mode", "explicit", "--scratch-directory", str(scratch))
    settings = {"scratch_directory": scratch, "trial_seconds": 0}
    async with (
        served(root, *flags, "--trial-seconds", "0") as server,
        serve(root, **settings) as neighbour,
    ):
        await load_override(server.url, root)
        (killed,) = hidden(scratch)
        await load_override(neighbour.url, root)
        (live,) = {*hidden(scratch)} - {killed}
        await server.stop(signal.SIGKILL)

        assert {killed, live} == {*hidden(scratch)}

        async with serve(root, **settings):
            assert [live] == hidden(scratch)

    assert [] == hidden(scratch)


async def load_override(url: str, root: Path) -> None:
    """Load a model from files in the request."""
    request = mesh.message("inference.RepositoryModelLoadRequest", model_name="identity")
    request.parameters["config"].string_param = "{}"
    for file in (root / "identity/1").iterdir():
        request.parameters[f"file:7/{file.name}"].bytes_param = file.read_bytes()
    async with grpc.aio.insecure_channel(url) as channel:
        made = channel.unary_unary(
            "/inference.GRPCInferenceService/RepositoryModelLoad",
            request_serializer=type(request).SerializeToString,
            response_deserializer=bytes,
        )
        await made(request)
