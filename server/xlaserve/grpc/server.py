"""The gRPC server: listening sockets, connections, graceful shutdown."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from xlaserve.grpc.engine.grpclib_stream import GrpclibConnection
from xlaserve.grpc.engine.h2_engine import CheckingHandler, H2Engine
from xlaserve.grpc.engine.own_engine import OwnEngine
from xlaserve.grpc.handler import RequestHandler
from xlaserve.grpc.http2.busy_poll import BusyPoll
from xlaserve.grpc.http2.connection import ReceiveBuffer, ServerConnection
from xlaserve.grpc.http2.limits import Http2Limits, Shared
from xlaserve.grpc.http2.protocol import Http2Protocol
from xlaserve.grpc.routes import FastPathsFactory, Router
from xlaserve.grpc.runner import Runner
from xlaserve.net.accepting import Acceptor, Handshakes
from xlaserve.net.rounds import Rounds
from xlaserve.net.tls import MakeContext
from xlaserve.process.endpoints import Listening
from xlaserve.settings.choices import Http2Engine

Engine: TypeAlias = H2Engine | OwnEngine

_ARRIVAL_SECONDS = 1.0
"""Time limit of three phases of a drain: for handshakes and GOAWAY round trips, for requests that
wait for more data from their client, and for clients to end requests that were answered before."""
_FAREWELL_SECONDS = 2.0
"""Seconds for which a shutdown waits for clients to close their connections."""
_LOOK_SECONDS = 0.01
_SPARE_SECONDS = 5.0
"""Seconds after which unused message buffers are freed."""
_SWEEPS = 4
"""Number of sweeps within the shortest time limit."""


class GrpcServer:
    """Serves gRPC services on any number of listening sockets.

    `engine` chooses the HTTP/2 implementation. `fast_paths` maps full method names to factories
    of routes that bypass the runner; only our own engine uses them.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        limits: Http2Limits,
        max_connections: int,
        shared: Shared,
        busy_poll_seconds: float = 0.0,
        engine: Http2Engine = Http2Engine.OWN,
        fast_paths: Mapping[str, FastPathsFactory] | None = None,
    ) -> None:
        self._runner = runner
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._max_connections = max_connections
        self._engine = engine
        self._fast_paths = fast_paths or {}
        self._shared = shared
        self._buffer = ReceiveBuffer()
        self._poll = BusyPoll(busy_poll_seconds, self._loop.call_soon)
        self._connections: set[Engine] = set()
        self._refused: set[Engine] = set()
        """Connections that were refused and are not closed yet."""
        self._acceptors: list[Acceptor] = []
        self._sweeps = Rounds(
            lambda: self._connections,
            self._sweep,
            seconds=lambda: self._sweep_seconds,
            afterwards=lambda: shared.memory.drop_unused(_SPARE_SECONDS),
        )
        self._draining = False

    def listen(
        self, listening: Listening, tls: MakeContext | None = None, *, name: str = ""
    ) -> None:
        """Serve on a listening socket; may be called for several.

        `name` is the setting of the endpoint, which `Peer.listener` reports.
        """
        shakes = None if tls is None else Handshakes(tls, self._limits.preface_seconds)
        factory = partial(self._make_protocol, name)
        acceptor = Acceptor(listening, factory, name=name, handshakes=shakes, is_full=self._is_full)
        self._acceptors.append(acceptor)
        if not self._sweeps.has_begun:
            self._sweeps.begin()

    def _is_full(self) -> bool:
        return len(self._connections) + self.in_handshake >= self._max_connections

    def _make_protocol(self, listener: str) -> asyncio.BaseProtocol:
        if self._engine is Http2Engine.OWN:
            return OwnEngine(self, RequestHandler(self._runner, listener), self._buffer, self._poll)
        account = self._shared.ledger.open()
        return H2Engine(self, CheckingHandler(self._runner, listener), self._limits, account)

    # --- callbacks of connections ---

    def connect(self, protocol: Http2Protocol, transport: asyncio.Transport) -> ServerConnection:
        """Create the protocol core of a new connection on our own engine."""
        assert isinstance(protocol, OwnEngine)
        account = self._shared.ledger.open()
        protocol.requests.connected(transport, account)
        connection = GrpclibConnection(transport, protocol.requests, self._limits)
        router = Router(connection, self._runner.methods, self._fast_paths)
        return ServerConnection(
            self._limits,
            router,
            self._shared,
            account=account,
            wake=protocol.wake,
            buffer=self._buffer,
        )

    def admit(self, protocol: "Http2Protocol | H2Engine") -> bool:
        """Register a new connection, or return false if there are too many."""
        assert isinstance(protocol, OwnEngine | H2Engine)
        if len(self._connections) >= self._max_connections:
            self._refused.add(protocol)
            return False
        self._connections.add(protocol)
        if self._draining:
            # The connection was in the accept queue or its handshake when the drain began; serve
            # the requests that its client sends before it reads the GOAWAY.
            self._loop.call_soon(protocol.go_away)
        return True

    def disconnected(self, protocol: "Http2Protocol | H2Engine") -> None:
        """Unregister a closed connection."""
        assert isinstance(protocol, OwnEngine | H2Engine)
        self._connections.discard(protocol)
        self._refused.discard(protocol)

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        return len(self._connections)

    @property
    def in_handshake(self) -> int:
        """Return the number of connections in their TLS handshake."""
        return sum(acceptor.in_handshake for acceptor in self._acceptors)

    @property
    def open_streams(self) -> int:
        """Return the number of requests in flight on all connections."""
        return sum(protocol.open_streams for protocol in self._connections)

    # --- timeouts ---

    @property
    def _sweep_seconds(self) -> float:
        limits = self._limits
        shortest = min(limits.message_seconds, limits.answer_seconds)
        return min(1.0, shortest / _SWEEPS)

    @property
    def _answer_seconds(self) -> float:
        limits = self._limits
        # A drain uses the shorter limit, so as not to wait for clients that read slowly.
        shorter = min(limits.answer_seconds, limits.message_seconds)
        return shorter if self._draining else limits.answer_seconds

    def _sweep(self, protocol: Engine) -> None:
        if isinstance(protocol, OwnEngine) and protocol in self._connections:
            every = self._sweep_seconds
            protocol.sweep(
                message_ticks=round(self._limits.message_seconds / every),
                answer_ticks=round(self._answer_seconds / every),
            )

    # --- shutdown ---

    async def drain(self, grace_seconds: float) -> None:
        """Stop accepting, let requests in flight complete, and close all connections.

        Each connection gets two GOAWAYs (RFC 9113 6.8). The first allows all streams, so that
        requests already sent are served, including those of connections in the accept queue. The
        second, one round trip later, names the last stream; the connection is closed when all of
        its streams have ended. Requests still running after `grace_seconds` are cancelled.
        Requests that wait for their client get _ARRIVAL_SECONDS, and are then cancelled as soon as
        all others have ended.
        """
        until = self._loop.time() + grace_seconds
        for acceptor in self._acceptors:
            acceptor.stop()
        self._draining = True
        for protocol in tuple(self._connections):
            protocol.go_away()
        await self._settled(min(grace_seconds, _ARRIVAL_SECONDS))
        for protocol in tuple(self._connections):
            protocol.leave()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._idle()
        for protocol in tuple(self._connections):
            protocol.end()
        self._sweeps.stop()
        requests = [protocol.requests for protocol in self._connections]
        for handler in requests:
            handler.close()
        await self._gone()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_SECONDS):
                for handler in requests:
                    await handler.idle(but_waiting=False)

    async def _gone(self) -> None:
        """Wait until clients have closed their connections, and abort the rest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_SECONDS):
                while self._connections or self._refused:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)
        while self._connections or self._refused:
            for protocol in (*self._connections, *self._refused):
                protocol.abort()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _settled(self, seconds: float) -> None:
        """Wait until all connections have sent their second GOAWAY, or for `seconds`.

        Connections still in their handshake are then aborted.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(acceptor.begun() for acceptor in self._acceptors))
                while not all(protocol.leaves for protocol in self._connections):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)
        for acceptor in self._acceptors:
            await acceptor.aborted()

    async def _idle(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_ARRIVAL_SECONDS):
                for protocol in tuple(self._connections):
                    await protocol.idle()
        for protocol in tuple(self._connections):
            await protocol.idle(but_waiting=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(_ARRIVAL_SECONDS):
                while any(map(_awaits_ends, self._connections)):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)


def _awaits_ends(protocol: Engine) -> bool:
    return isinstance(protocol, OwnEngine) and protocol.core.awaits_ends
