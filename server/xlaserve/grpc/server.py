"""The gRPC server: its listening sockets, its connections, and their graceful end."""

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
"""Seconds that a drain waits for handshakes, for the clients' round trips, and then for those that
have begun a request to go on with it."""
_FAREWELL_SECONDS = 2.0
"""Seconds for which a stop waits for clients to close their connections."""
_LOOK_SECONDS = 0.01
_SPARE_SECONDS = 5.0
"""Seconds for which message memory is kept for reuse."""
_SWEEPS = 4
"""Checks per shortest time limit."""


class GrpcServer:
    """Serves the methods of services on any number of listening sockets.

    `engine` chooses what speaks HTTP/2. With our own, `fast_paths` go past the runner;
    they are by the full name of their method.
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
        """Refused connections, until they are closed."""
        self._acceptors: list[Acceptor] = []
        self._sweeps = Rounds(
            lambda: self._connections,
            self._sweep,
            seconds=lambda: self._sweep_seconds,
            behind=lambda: shared.memory.drop_unused(_SPARE_SECONDS),
        )
        self._draining = False

    def listen(
        self, listening: Listening, tls: MakeContext | None = None, *, name: str = ""
    ) -> None:
        """Serve on a socket that is bound and listens; may be called for more than one.

        `name` is the setting of the endpoint, as peers show it.
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

    # --- the life of a connection, told by its protocol ---

    def connect(self, protocol: Http2Protocol, transport: asyncio.Transport) -> ServerConnection:
        """Return the core of a new connection of our own engine."""
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
        """Tell whether another connection is admitted."""
        assert isinstance(protocol, OwnEngine | H2Engine)
        if len(self._connections) >= self._max_connections:
            self._refused.add(protocol)
            return False
        self._connections.add(protocol)
        if self._draining:
            # It waited in the accept queue, or for its handshake: its first requests are served.
            self._loop.call_soon(protocol.go_away)
        return True

    def disconnected(self, protocol: "Http2Protocol | H2Engine") -> None:
        """Record the end of a connection."""
        assert isinstance(protocol, OwnEngine | H2Engine)
        self._connections.discard(protocol)
        self._refused.discard(protocol)

    @property
    def connections(self) -> int:
        """Return how many connections are open."""
        return len(self._connections)

    @property
    def in_handshake(self) -> int:
        """Return the number of connections in their TLS handshake."""
        return sum(acceptor.in_handshake for acceptor in self._acceptors)

    @property
    def open_streams(self) -> int:
        """Return how many requests are in flight on all connections."""
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
        # A drain has not the time for clients that read an answer whenever they like.
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
        """Take no more connections, tell clients to go, and end when requests have ended.

        RFC 9113, 6.8: the first GOAWAY names no stream, so that requests on their way are still
        served, also those of connections in the accept queue; the second one, a round trip later,
        names the last stream, and a connection is closed once that has ended. Requests that take
        longer than `grace_seconds` are cut off, and those that only wait for their client to go on
        with them when all others have ended.
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
        """Return when every connection is closed: those whose clients keep them are cut off."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_SECONDS):
                while self._connections or self._refused:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)
        while self._connections or self._refused:
            for protocol in (*self._connections, *self._refused):
                protocol.abort()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _settled(self, seconds: float) -> None:
        """Return when every client has been told its last stream, or the time has come.

        What is still in its handshake then is cut off.
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
