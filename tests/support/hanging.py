"""A limit for what runs after a failure: pytest and pytest-timeout drop theirs with the first one.

Both think that somebody has begun to look at the failure in a debugger. A teardown that then hangs,
of a server that does not end for one, would hold the whole run for ever.
"""

import faulthandler
import sys

import pytest


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Give the rest of a test that failed as long as a whole one has: then its process ends.

    pytest takes this limit away at the end of the test. xdist says which test it was, and goes on
    with another process.
    """
    limit = float(node.config.getini("faulthandler_timeout") or 0)
    if isinstance(node, pytest.Item) and limit and not node.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(limit, file=sys.__stderr__ or 2, exit=True)
