"""Foreign clients that are programs of their own."""

from functools import partial
from pathlib import Path

import pytest
from support.go_tools import go_program
from support.npm_tools import node_program
from support.server import Serve, serving

FOLDER = Path(__file__).parent

GRPCURL = "github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3"


@pytest.fixture
def serve(tmp_path: Path, programs: str) -> Serve:
    """Run a server that compiles what no other has: clients see only that it answers."""
    return partial(serving, tmp_path, compilation_cache_directory=programs)


@pytest.fixture(scope="session")
def grpcurl(pytestconfig: pytest.Config) -> str:
    """The path of grpcurl: installed, or built once where Go is present."""
    return go_program(pytestconfig, "grpcurl", GRPCURL)


@pytest.fixture(scope="session")
def go_client(pytestconfig: pytest.Config) -> tuple[str, ...]:
    """The command of a client that is built on grpc-go."""
    return (go_program(pytestconfig, "goclient", ".", FOLDER / "go_client"),)


@pytest.fixture(scope="session")
def js_client(pytestconfig: pytest.Config) -> tuple[str, ...]:
    """The command of a client that is built on grpc-js."""
    return node_program(pytestconfig, FOLDER / "js_client", "client.js")
