"""Fixtures for model runtime tests: models, and a server driven by a mesh."""

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
    """All models of the shelf, outside the server's repository."""
    return shelf.Shelf(made_once(tmp_path_factory, "shelf", shelf.fill))


# Answers do not depend on the kind of endpoint, and all other tests use a port. `slow` runs
# test_model_runtime_ids.py on a port as well.
@pytest.fixture(params=["unix", pytest.param("port", marks=pytest.mark.large)])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A Unix socket, as in deploy/modelmesh; `large` runs use a free port as well."""
    return endpoint_at(request.param, tmp_path)


@pytest.fixture
def start(serve: Serve, models: shelf.Shelf, tmp_path: Path, endpoint: str) -> StartRuntime:
    """Run a server on an empty repository, listening at the test's endpoint."""
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
    """A server with default settings."""
    async with start() as running:
        yield running


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Collect the names of the functions XLA compiles during a test; the list may be cleared."""
    with noted_compilations() as names:
        yield names
