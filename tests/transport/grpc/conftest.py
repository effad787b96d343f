"""Fixtures of the gRPC tests: the codec, google's protobuf to compare with, a loopback server."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

import pytest
from grpclib._typing import IServable
from grpclib.protocol import H2Protocol
from grpclib.server import Server
from support.protobuf import Google

from xlaserve.grpc.protobuf.codec import WireCodec

ServeHandlers: TypeAlias = Callable[[Collection[IServable]], AbstractAsyncContextManager[str]]


@pytest.fixture(scope="session")
def google() -> Google:
    """Google's protobuf classes for the generated ones."""
    return Google()


@pytest.fixture
def codec() -> WireCodec:
    """The codec with a server's default limits."""
    return WireCodec()


@pytest.fixture
def serve_handlers(codec: WireCodec) -> ServeHandlers:
    """Serve handlers over the codec for the length of a block; yields `host:port`."""

    @asynccontextmanager
    async def run(handlers: Collection[IServable]) -> AsyncIterator[str]:
        server = _Server(handlers, codec=codec)
        listener = socket.create_server(("127.0.0.1", 0))
        await server.start(sock=listener)
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.close()
            await server.close_connections()
            await server.wait_closed()

    return run


class _Protocol(H2Protocol):
    """Signals the loss of its connection, which grpclib does not wait for."""

    transport: asyncio.BaseTransport
    lost: "asyncio.Future[None]"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.lost = asyncio.get_running_loop().create_future()
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.lost.set_result(None)

    async def close(self) -> None:
        self.transport.close()
        await self.lost


class _Server(Server):
    def __init__(self, handlers: Collection[IServable], *, codec: WireCodec) -> None:
        super().__init__(handlers, codec=codec)
        self._protocols: list[_Protocol] = []

    def _protocol_factory(self) -> H2Protocol:
        handler = super()._protocol_factory().handler
        protocol = _Protocol(handler, self._config, self._h2_config)
        self._protocols.append(protocol)
        return protocol

    async def close_connections(self) -> None:
        for protocol in self._protocols:
            await protocol.close()
