"""Fixtures of the command line tests: compilation within the process, and a separate log."""

import sys
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True, scope="module")
def compiled_here() -> Iterator[None]:
    """Save each command the start of a compiler process, which takes 1.4 seconds of a core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLASERVE_COMPILE_PROCESSES", "0")
        yield


@pytest.fixture(autouse=True)
def log_apart(new_log: None) -> None:
    """Keep the log of a server in this process out of the output of a command.

    structlog prints to the current `sys.stdout`, which is the command's while one runs: a log line
    would end up in the middle of its JSON.
    """
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))
