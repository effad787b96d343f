"""A connection that has sent only its preface uses little memory: there may be ten thousand."""

import gc
import tracemalloc
from functools import partial
from typing import Any, cast

from support import frames

from xlaserve.concurrency.host import HostThreads
from xlaserve.grpc.engine.own_engine import OwnEngine
from xlaserve.grpc.http2.limits import Http2Limits, Shared
from xlaserve.grpc.infer.infer_codec import InferCodec
from xlaserve.grpc.infer.infer_fast_path import METHOD
from xlaserve.grpc.infer.infer_fast_paths import InferFastPaths
from xlaserve.grpc.infer.long_messages import LongMessages
from xlaserve.grpc.server import GrpcServer
from xlaserve.net.ledger import Ledger
from xlaserve.net.memory import MessageMemory
from xlaserve.serving.gates import Gates
from xlaserve.settings.choices import Http2Engine

GREETING = frames.PREFACE + bytes(frames.settings())
CONNECTIONS = 100
MOST_BYTES = 5200
"""Limit of bytes per connection, without the event loop's own objects."""


class Transport:
    """A transport that discards its output."""

    def set_write_buffer_limits(self, high: int) -> None:
        """Ignore the limit."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return False

    def writelines(self, parts: list[bytes]) -> None:
        """Discard the data."""


class NoMethods:
    methods: dict[str, Any] = {}  # noqa: RUF012


def a_server() -> GrpcServer:
    codec = InferCodec(max_fields=1000, max_depth=10)
    long = LongMessages(HostThreads(1), 1 << 20)
    fast_paths = partial(InferFastPaths, cast(Any, None), Gates(), codec, None, long=long)
    return GrpcServer(
        cast(Any, NoMethods()),
        limits=Http2Limits(),
        max_connections=10 * CONNECTIONS,
        shared=Shared(Ledger(1 << 30), MessageMemory(1 << 20)),
        busy_poll_seconds=0,
        engine=Http2Engine.OWN,
        fast_paths={METHOD: fast_paths},
    )


async def test_a_silent_connection_holds_little() -> None:
    server = a_server()

    def connect() -> OwnEngine:
        protocol = cast(OwnEngine, server._make_protocol("grpc_endpoint"))
        protocol.connection_made(cast(Any, Transport()))
        protocol.get_buffer(-1)[: len(GREETING)] = GREETING
        protocol.buffer_updated(len(GREETING))
        return protocol

    connections = [connect() for _ in range(10)]
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        connections += [connect() for _ in range(CONNECTIONS)]
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert all(connection.core.greeted for connection in connections)
    assert MOST_BYTES * CONNECTIONS >= after - before
    for connection in connections:
        connection.connection_lost(None)
