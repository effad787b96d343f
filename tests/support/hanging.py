"""Timeouts that hold after a failure, and the name of the running test for tools/gate.py.

pytest and pytest-timeout cancel their timeouts after the first failure, assuming that somebody
inspects it in a debugger. A teardown that then hangs, for example because a server does not exit,
would block the whole run forever.
"""

import faulthandler
import os
import sys
from pathlib import Path

import pytest

RUNNING = "RUNNING_TESTS"
"""Environment variable naming a directory where each process writes its running test."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Write the test's id to a file named after this process; tools/gate.py reads it."""
    if directory := os.environ.get(RUNNING):
        Path(directory, str(os.getpid())).write_text(item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Give the rest of a failed test another full timeout, after which the process exits.

    pytest cancels the timer at the end of the test. xdist reports the test whose worker died
    and starts another worker.
    """
    limit = float(node.config.getini("faulthandler_timeout") or 0)
    if isinstance(node, pytest.Item) and limit and not node.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(limit, file=sys.__stderr__ or 2, exit=True)
