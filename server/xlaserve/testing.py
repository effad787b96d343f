"""Fixtures of pytest: servers of models for tests. Needs pytest.

pytest_plugins = ["xlaserve.testing"]  # in conftest.py

def test_answers(xlaserve_serve):
    server = xlaserve_serve("models")
    assert server.client.ready()
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from xlaserve.local.servers import Server, serve


@pytest.fixture(scope="session")
def xlaserve_serve() -> Iterator[Callable[..., Server]]:
    """Return a function that starts a server, as `xlaserve.serve` does; all end with the session.

    Asked again with the same arguments it starts another one: a fixture of the module that asks
    once has its tests share it.
    """
    with ExitStack() as stack:

        def started(*args: Any, **kwargs: Any) -> Server:
            return stack.enter_context(serve(*args, **kwargs))

        yield started
