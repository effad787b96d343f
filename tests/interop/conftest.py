"""Foreign clients that are programs of their own."""

import pytest
from support.go_tools import go_program

GRPCURL = "github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3"


@pytest.fixture(scope="session")
def grpcurl(pytestconfig: pytest.Config) -> str:
    """The path of grpcurl: installed, or built once where Go is present; else a skip."""
    return go_program(pytestconfig, "grpcurl", GRPCURL)
