"""External client programs."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.browser import Page, browsing
from support.go_tools import go_program
from support.npm_tools import node_packages, node_program

FOLDER = Path(__file__).parent

GRPCURL = "github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3"


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


@pytest.fixture(scope="session")
def axe(pytestconfig: pytest.Config) -> str:
    """The script of axe-core, which finds accessibility problems."""
    folder = node_packages(pytestconfig, FOLDER / "axe")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="page")
async def _page(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    """A headless browser's tab, shared by the tests of a module."""
    async with browsing(tmp_path_factory.mktemp("profile")) as page:
        yield page
