"""pytest fixtures that run servers for tests. Requires pytest.

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
    """Return a function that starts servers like `xlaserve.serve`; they stop with the session.

    Every call starts another server. To share one between tests, call it in a fixture with module
    scope.
    """
    with ExitStack() as stack:

        def started(*args: Any, **kwargs: Any) -> Server:
            return stack.enter_context(serve(*args, **kwargs))

        yield started
