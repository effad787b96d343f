"""A port that accepts connections and never answers."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hanging_port() -> Iterator[int]:
    """Listen on the loopback for the duration of a block; only the kernel accepts connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        yield listening.getsockname()[1]
