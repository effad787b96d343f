"""What the tests of the gRPC transport share: the codec, its judge, and a server on loopback."""

import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

import pytest
from grpclib._typing import IServable
from grpclib.server import Server
from support.protobuf import Google

from xlaserve.transport.grpc.codec import WireCodec

ServeHandlers: TypeAlias = Callable[[Collection[IServable]], AbstractAsyncContextManager[str]]
"""Serves handlers on a free loopback port for the length of a block, and gives `host:port`."""


@pytest.fixture(scope="session")
def google() -> Google:
    """Google's classes for the generated ones."""
    return Google()


@pytest.fixture
def codec() -> WireCodec:
    """The codec with the limits that a server has by default."""
    return WireCodec()


@pytest.fixture
def serve_handlers(codec: WireCodec) -> ServeHandlers:
    """A plain grpclib server over the codec."""

    @asynccontextmanager
    async def run(handlers: Collection[IServable]) -> AsyncIterator[str]:
        server = Server(handlers, codec=codec)
        listener = socket.create_server(("127.0.0.1", 0))
        await server.start(sock=listener)
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.close()
            await server.wait_closed()

    return run
