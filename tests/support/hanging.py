"""Limits that hold after a failure, and the name of the running test for who ends the run.

pytest and pytest-timeout drop their limits with the first failure: both think that somebody has
begun to look at the failure in a debugger. A teardown that then hangs, of a server that does not
end for one, would hold the whole run for ever.
"""

import faulthandler
import os
import sys
from pathlib import Path

import pytest

RUNNING = "RUNNING_TESTS"
"""Environment variable with a directory, in which each process names the test that it runs."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Say which test begins, in a file named for this process: tools/gate.py reads it."""
    if directory := os.environ.get(RUNNING):
        Path(directory, str(os.getpid())).write_text(item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Give the rest of a test that failed as long as a whole one has: then its process ends.

    pytest takes this limit away at the end of the test. xdist says which test it was, and goes on
    with another process.
    """
    limit = float(node.config.getini("faulthandler_timeout") or 0)
    if isinstance(node, pytest.Item) and limit and not node.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(limit, file=sys.__stderr__ or 2, exit=True)
