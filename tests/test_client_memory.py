"""Large inputs of the client in shared memory, over gRPC, REST and unix sockets."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support.python_models import write
from support.server import RunningServer, serving

from xlaserve.client import AsyncClient, CallFailed, Client
from xlaserve.client.memory import is_local
from xlaserve.dialing.address import InvalidAddress, parse_address

ECHO = """
class Echo(PythonModel):
    inputs = outputs = {"x": ("FP32", [-1]), "t": ("BYTES", [-1]), "n": ("BF16", [])}

    def infer(self, inputs):
        return inputs
"""
LARGE = {
    "x": np.arange(100_000, dtype=np.float32),
    "t": np.array([b"a" * 70_000, b"", b"b"], object),
    "n": np.array(1.5),
}
MEMORY = 1 << 22

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    root = tmp_path_factory.mktemp("models")
    write(root, "echo", ECHO)
    settings: dict[str, Any] = {
        "load_model": ("*",),
        "allow_python_models": True,
        "grpc_endpoint": f"unix:{root / 'grpc.sock'}",
        "http_endpoint": f"unix:{root / 'http.sock'}",
        "max_shared_memory_regions": 3,
    }
    async with serving(tmp_path_factory.mktemp("scratch"), root, **settings) as found:
        yield found


@pytest.fixture(params=["grpc", "http"])
def url(server: RunningServer, request: pytest.FixtureRequest) -> str:
    """The address of the server for gRPC or REST, both on unix sockets."""
    return server.url if request.param == "grpc" else f"http+{server.http}".replace(":", "://", 1)


def known(server: RunningServer) -> list[int]:
    """Return the sizes of the server's regions; a region in hand would count as one in use."""
    return [region.byte_size for region in server.application.engine.regions.status()]


async def kept(server: RunningServer, count: int) -> list[int]:
    """Wait until the server has so many regions, and return their sizes.

    A thread that has answered a request may use its region for a moment longer.
    """
    async with asyncio.timeout(60):
        while len(found := known(server)) != count:
            await asyncio.sleep(0.01)
    return found


def inputs() -> dict[str, Any]:
    import ml_dtypes

    return {**LARGE, "n": LARGE["n"].astype(ml_dtypes.bfloat16)}


def same(answer: Any) -> bool:
    return all(np.array_equal(answer.tensors[name], value) for name, value in inputs().items())


async def test_large_inputs_are_in_a_region_that_is_used_again(
    server: RunningServer, url: str
) -> None:
    """Nothing is left in /dev/shm, and the server unregisters the region when the client closes."""
    async with AsyncClient(url, shared_memory_bytes=MEMORY) as client:
        answers = [await client.infer("echo", inputs()) for _ in range(3)]
        sizes = await kept(server, 1)
        files = list(Path("/dev/shm").glob(f"xlaserve-client-{os.getpid()}-*"))

        assert all(map(same, answers))
        assert "" == client.not_shared
        assert [1 << 19] == sizes
        assert [] == files
    await kept(server, 0)


async def test_requests_side_by_side_have_regions_of_their_own(
    server: RunningServer, url: str
) -> None:
    """Requests beyond the limits use the connection, and no request sees another's data."""
    async with AsyncClient(url, shared_memory_bytes=MEMORY) as client:
        wanted = [np.full(50_000, number, np.float32) for number in range(12)]
        given = [{**inputs(), "x": value} for value in wanted]
        found = await asyncio.gather(*(client.infer("echo", each) for each in given))

        assert 1 <= len(known(server)) <= 3
    assert all(map(np.array_equal, wanted, (each.tensors["x"] for each in found)))


async def test_a_limit_keeps_large_inputs_on_the_connection(
    server: RunningServer, url: str
) -> None:
    async with AsyncClient(url, shared_memory_bytes=1 << 18) as client:
        assert same(await client.infer("echo", inputs()))
        await kept(server, 0)
        small = {**inputs(), "x": np.ones(20_000, np.float32), "t": np.array([b"t"], object)}
        await client.infer("echo", small)
        await kept(server, 1)


async def test_a_server_that_has_forgotten_the_region_is_asked_again(
    server: RunningServer, url: str
) -> None:
    async with AsyncClient(url, shared_memory_bytes=MEMORY) as client:
        await client.infer("echo", inputs())
        server.application.engine.regions.close()
        assert same(await client.infer("echo", inputs()))
        await kept(server, 0)
        assert same(await client.infer("echo", inputs()))
        await kept(server, 1)


async def test_what_the_model_refuses_keeps_the_region(server: RunningServer, url: str) -> None:
    async with AsyncClient(url, shared_memory_bytes=MEMORY) as client:
        with pytest.raises(CallFailed, match="input 'x'"):
            await client.infer("echo", {**inputs(), "x": LARGE["x"].astype(np.int32)})
        assert same(await client.infer("echo", inputs()))
        await kept(server, 1)


async def test_a_server_that_allows_none_is_asked_over_the_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log and the client report it once."""
    write(tmp_path / "models", "echo", ECHO)
    settings: dict[str, Any] = {"allow_python_models": True, "shared_memory": "none"}
    async with serving(tmp_path, tmp_path / "models", load_model=("*",), **settings) as found:
        with caplog.at_level(logging.WARNING, "xlaserve.client"):
            async with AsyncClient(found.url, shared_memory_bytes=MEMORY) as client:
                assert same(await client.infer("echo", inputs()))
                assert same(await client.infer("echo", inputs()))
                problem = client.not_shared

    assert "shared_memory" in problem
    assert 1 == sum("shared memory is not used for inputs" in text for text in caplog.messages)


async def test_code_that_is_no_coroutine_shares_too(server: RunningServer, url: str) -> None:
    def _ask() -> tuple[bool, int]:
        with Client(url, shared_memory_bytes=MEMORY) as client:
            return same(client.infer("echo", inputs())), len(known(server))

    assert (True, 1) == await asyncio.to_thread(_ask)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/a", True),
        ("http+unix:///a", True),
        ("10.0.0.1:1", False),
        ("models.example:1", False),
    ],
)
async def test_only_addresses_of_this_machine_share(address: str, local: bool) -> None:
    assert local == is_local(parse_address(address))


async def test_a_unix_socket_has_a_path() -> None:
    with pytest.raises(InvalidAddress, match="path of a unix socket"):
        parse_address("http+unix://")
