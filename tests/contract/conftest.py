"""What the tests of the model runtime share: models, and a server that a mesh drives."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support import mesh, shelf
from support.compilations import noted_compilations
from support.made_once import made_once
from support.runtime import Runtime, StartRuntime, endpoint_at
from support.server import Serve

from xlaserve.settings.choices import ModelControlMode


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> shelf.Shelf:
    """Every model of the shelf; none is in the server's repository."""
    return shelf.Shelf(made_once(tmp_path_factory, "shelf", shelf.fill))


# What a mesh is answered does not depend on the kind of its endpoint, and all others ask a port.
# test_model_runtime_ids.py is asked at a port by `slow` too.
@pytest.fixture(params=["unix", pytest.param("port", marks=pytest.mark.large)])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A unix socket, as deploy/modelmesh has it; and a free port, where large tests run too."""
    return endpoint_at(request.param, tmp_path)


@pytest.fixture
def start(serve: Serve, models: shelf.Shelf, tmp_path: Path, endpoint: str) -> StartRuntime:
    """Run a server on an empty repository, which listens at the endpoint of the test."""
    repository = tmp_path / "repository"
    repository.mkdir()

    @asynccontextmanager
    async def run(*, asked: bool = True, **settings: Any) -> AsyncIterator[Runtime]:
        defaults: dict[str, Any] = {
            "modelmesh": True,
            "model_control_mode": ModelControlMode.NONE,
            "grpc_endpoint": endpoint,
            "model_root": (models.root,),
            "repository": repository,
        }
        settings = defaults | settings
        async with serve(**settings) as server, mesh.dial(server.url) as sidecar:
            if asked:
                await sidecar.status()
            yield Runtime(server.application, server.url, sidecar, server.http or "")

    return run


@pytest.fixture
async def runtime(start: StartRuntime) -> AsyncIterator[Runtime]:
    """A server with the default settings."""
    async with start() as running:
        yield running


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Collect the names of what XLA compiles while a test runs; may be cleared."""
    with noted_compilations() as names:
        yield names
