"""A URL with the wrong protocol gets the right one suggested: each server with each scheme."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import trustme
from support.server import serving
from support.tls import write_certificate
from typer.testing import CliRunner

from xlaserve.cli import application

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPOKEN = {
    "grpc": "gRPC",
    "grpcs": "gRPC over TLS",
    "http": "HTTP",
    "https": "HTTP over TLS",
}
COMMANDS = (("models", "list"), ("infer", "identity", "--input", "x=zeros"), ("health",))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def listening(
    example_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mapping[str, str]]:
    """Yield an address for each scheme."""
    both: dict[str, Any] = {"load_model": ("identity",), "http_endpoint": "port:0"}
    folder = tmp_path_factory.mktemp("tls")
    certificate = write_certificate(trustme.CA(), folder)
    async with (
        serving(tmp_path_factory.mktemp("plain"), example_models, **both) as plain,
        serving(folder, example_models, **both, **certificate) as safe,
    ):
        yield {
            "grpc": plain.url,
            "http": str(plain.http),
            "grpcs": safe.url,
            "https": str(safe.http),
        }


async def told(command: tuple[str, ...], url: str) -> BaseException | None:
    """Run a command in a thread, because it has its own event loop; return its error."""
    arguments = [*command, "--url", url]
    result = await asyncio.to_thread(CliRunner().invoke, application(), arguments)
    return result.exception


@pytest.mark.parametrize("typed", SPOKEN)
@pytest.mark.parametrize("there", SPOKEN)
async def test_the_url_to_type(listening: Mapping[str, str], there: str, typed: str) -> None:
    address = listening[there]
    for command in COMMANDS:
        error = await told(command, f"{typed}://{address}")
        said = f"it seems to speak {SPOKEN[there]}: try --url {there}://{address}"

        assert (typed != there) == str(error).endswith(said), (command, error)
        # Matching TLS schemes fail too: the certificate is not trusted.
        assert (error is None) == (typed == there and not there.endswith("s"))


async def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        error = await told(("models", "list"), f"127.0.0.1:{port}")

    assert str(error).startswith(f"127.0.0.1:{port}: cannot connect: ")
    assert "try" not in str(error)


async def test_a_port_that_never_answers_is_not_waited_for_long() -> None:
    """The command's own error is shown, without advice."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        error = await told(("health", "--timeout", "1"), f"http://{address}")

    assert f"http://{address}: no answer in time" == str(error)
