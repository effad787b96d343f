"""The exit status for probes, and a line with the reason."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import typer
from grpclib.server import Server
from support.process import ONLY_IDENTITY, command, run, served
from support.python_models import VECTORS, write
from support.server import Serve
from typer.testing import CliRunner

from xlaserve.app.server import Application
from xlaserve.cli.health import health
from xlaserve.dialing.interface import CallFailed
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.settings import Settings
from xlaserve.settings.description import describe_settings
from xlaserve_proto import inference as pb

SECONDS = 30.0
SLOW = """
import pathlib, time

class Model(PythonModel):
    def load(self, context):
        while not pathlib.Path({gate!r}).exists():
            time.sleep(0.01)

    def infer(self, inputs):
        return {{"y": inputs["x"]}}
"""
WITHOUT_OPTIONS = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))


class Starting(pb.GrpcInferenceServiceBase):
    """A server that is live and still loads its models."""

    async def server_live(self, server_live_request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def server_ready(
        self, server_ready_request: pb.ServerReadyRequest
    ) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=False)


@asynccontextmanager
async def starting(path: Path) -> AsyncIterator[str]:
    """Serve a server that is not ready on a unix socket, for the length of a block."""
    server = Server([Starting()], codec=WireCodec())
    await server.start(path=str(path))
    try:
        yield f"unix:{path}"
    finally:
        server.close()
        await server.wait_closed()


async def ask(url: str, *, live: bool = False, timeout: float = SECONDS) -> None:
    """Run the command in a thread, because it has its own event loop."""
    await asyncio.to_thread(health, WITHOUT_OPTIONS, url=url, live=live, timeout=timeout)


async def test_a_server_that_has_started_is_live_and_ready(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(tmp_path) as server:
        await ask(server.url, live=True)
        await ask(server.url)

    assert f"{server.url}: live\n{server.url}: ready\n" in capsys.readouterr().out


@pytest.mark.parametrize("endpoint", ["port", "unix"])
async def test_the_url_may_be_the_endpoint_as_the_server_has_it(
    serve: Serve, tmp_path: Path, endpoint: str
) -> None:
    path = f"unix:{tmp_path / 'grpc.sock'}"
    async with serve(tmp_path, grpc_endpoint=path if endpoint == "unix" else "port:0") as server:
        url = path if endpoint == "unix" else f"port:{server.url.rpartition(':')[2]}"
        await ask(url)


async def test_a_server_that_starts_is_live_and_not_ready(tmp_path: Path) -> None:
    async with starting(tmp_path / "grpc.sock") as url:
        await ask(url, live=True)
        with pytest.raises(CallFailed, match=f"{url}: the server is not ready"):
            await ask(url)


async def test_a_start_is_described_with_the_models_that_are_loading(tmp_path: Path) -> None:
    gate, models = tmp_path / "gate", tmp_path / "models"
    write(models, "slow", SLOW.format(gate=str(gate)), VECTORS)
    start = ("--allow-python-models", "--model-control-mode", "none")
    async with served(models, *start, until="listening") as server:
        async with asyncio.timeout(SECONDS):
            while "loading 'slow'" not in await told(server.url):
                await asyncio.sleep(0.01)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{server.http}/v2/health/ready") as answer:
                body = await answer.json()
        gate.touch()
        await server.until("started")

    assert "models are being loaded for the first time: 'slow'" == body["reason"]


async def test_a_repository_that_was_not_read_yet_is_starting_and_not_unreadable(
    tmp_path: Path,
) -> None:
    """The error is that of requests for a model, which dashboards count as starting."""
    given = {"grpc_endpoint": "port:0", "http_endpoint": "none", "device": "cpu"}
    application = Application(Settings.read({}, repository=tmp_path, **given))
    async with application.running() as addresses:
        text = await told(addresses.grpc)

    assert text.endswith(
        "no model is available yet: the model repository has not been read yet, try again"
    )


async def told(url: str) -> str:
    """Return the error of the command."""
    with pytest.raises(CallFailed) as caught:
        await ask(url)
    return str(caught.value)


async def test_where_nobody_listens_is_said(tmp_path: Path) -> None:
    with pytest.raises(CallFailed, match="cannot connect: No such file"):
        await ask(f"unix:{tmp_path / 'nobody'}")


async def test_a_server_that_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    path = tmp_path / "silent.sock"
    async with await asyncio.start_unix_server(listen, path):
        with pytest.raises(CallFailed, match="no answer in time"):
            await ask(f"unix:{path}", timeout=0.05)


async def test_the_variable_of_the_server_is_read(tmp_path: Path) -> None:
    """One variable of a container configures both the server and its probe."""
    variable = next(row.variable for row in describe_settings() if row.name == "grpc_endpoint")
    application = typer.Typer()
    application.command()(health)
    async with starting(tmp_path / "grpc.sock") as url:
        result = await asyncio.to_thread(
            CliRunner().invoke, application, ["--live"], env={variable: url}
        )

    assert (0, f"{url}: live\n") == (result.exit_code, result.output)


@pytest.mark.slow
async def test_a_probe_reads_the_exit_status(example_models: Path) -> None:
    async with served(example_models, *ONLY_IDENTITY) as server:
        alive = await run(*command("health", "--live", "--url", server.url))
    dead = await run(*command("health", "--url", server.url))

    assert (0, f"{server.url}: live\n", "") == alive
    assert (1, "") == dead[:2]
    assert dead[2].startswith(f"error: {server.url}: cannot connect")
    assert 1 == dead[2].count("\n")


async def test_a_probe_does_not_import_jax() -> None:
    """A probe runs every few seconds next to the server; importing jax would take seconds."""
    code = "import sys; from xlaserve.cli import health; print('jax' in sys.modules)"

    assert (0, "False\n", "") == await run(sys.executable, "-c", code)
