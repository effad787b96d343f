"""What every test of the command line has: compilation in its own process, the log kept apart."""

import sys
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True, scope="module")
def compiled_here() -> Iterator[None]:
    """Spare each command the start of a process that compiles, 1.4 seconds of a core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLASERVE_COMPILE_PROCESSES", "0")
        yield


@pytest.fixture(autouse=True)
def log_apart(new_log: None) -> None:
    """Keep the log of a server in this process out of what a command prints.

    structlog prints to the `sys.stdout` of the moment, which is the command's own while one runs:
    a line of the server would stand in the middle of its JSON.
    """
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))
