"""The memory that a request reserves while grpclib reads its messages."""

import asyncio
import gzip
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grpclib import GRPCError
from support.frames import PREFACE, data, headers, literals, rst_stream, settings

from xlaserve.grpc.engine.grpclib_stream import GrpclibStream
from xlaserve.grpc.http2.connection import ServerConnection
from xlaserve.grpc.http2.limits import Http2Limits, Shared
from xlaserve.grpc.http2.messages import PREFIX, PREFIX_BYTES, Placement
from xlaserve.grpc.http2.stream import ServerStream
from xlaserve.net.ledger import Ledger
from xlaserve.net.memory import MessageMemory

REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/a"), ("grpc-encoding", "gzip")]
LIMIT = 1 << 20


def prefixed(message: bytes, *, compressed: bool = False) -> bytes:
    packed = gzip.compress(message) if compressed else message
    return PREFIX.pack(compressed, len(packed)) + packed


class Client:
    """An in-memory connection with one request; the test reads it in place of grpclib."""

    placement: Placement | None = None
    accepted: GrpclibStream

    def __init__(self, *, streaming: bool) -> None:
        self.message_first = not streaming
        self.ledger = Ledger(LIMIT)
        shared = Shared(self.ledger, MessageMemory(0))
        self.core = ServerConnection(Http2Limits(), lambda head: self, shared)
        self.core.start()
        self.core.receive(PREFACE + bytes(settings()) + bytes(headers(1, literals(REQUEST))))

    def begin(self, stream: ServerStream) -> None:
        handler = SimpleNamespace(accept=lambda *_: None, cancel=lambda _: None)
        connection = SimpleNamespace(transport=None, handler=handler, limits=Http2Limits())
        self.accepted = GrpclibStream(stream, cast(Any, connection))
        self.accepted.start(streaming=not self.message_first)

    def send(self, octets: bytes, *, end: bool = False) -> None:
        self.core.receive(bytes(data(1, octets, end_stream=end)))

    async def read(self) -> bytes:
        """Read a message as grpclib does."""
        prefix = await self.accepted.recv_data(PREFIX_BYTES)
        return bytes(await self.accepted.recv_data(PREFIX.unpack(prefix)[1]))


async def test_a_stream_holds_its_messages_until_the_next_one_is_read() -> None:
    """However long the stream lasts, it reserves one message at a time."""
    client = Client(streaming=True)
    for _ in range(3):
        client.send(prefixed(bytes(100)) + prefixed(bytes(50)))

        assert bytes(100) == await client.read()
        assert 2 * PREFIX_BYTES + 150 == client.ledger.held
        assert bytes(50) == await client.read()
        assert PREFIX_BYTES + 50 == client.ledger.held


@pytest.mark.parametrize("cut", [3, 9, 10, 14, 15, 20_000, -1])
async def test_the_last_message_may_come_in_two_reads(cut: int) -> None:
    """Its frame has END_STREAM from the beginning, but its bytes arrive later."""
    client = Client(streaming=True)
    frame = bytes(data(1, prefixed(bytes(40_000)), end_stream=True))
    client.core.receive(frame[:cut])
    reading = asyncio.create_task(client.read())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not reading.done()
    client.core.receive(frame[cut:])

    assert bytes(40_000) == await reading
    assert b"" == await client.accepted.recv_data(PREFIX_BYTES)


async def test_what_was_inflated_counts_too() -> None:
    client = Client(streaming=True)
    message = prefixed(bytes(1000), compressed=True)
    client.send(message + prefixed(b""))

    assert bytes(1000) == await client.read()
    assert len(message) + PREFIX_BYTES + 1000 == client.ledger.held
    client.send(prefixed(b"a"))
    assert b"" == await client.read()
    assert b"a" == await client.read()
    assert PREFIX_BYTES + 1 == client.ledger.held


async def test_nothing_is_held_for_a_request_that_is_over() -> None:
    client = Client(streaming=False)
    client.send(prefixed(bytes(1000), compressed=True), end=True)

    assert bytes(1000) == await client.read()
    assert client.ledger.held >= 1000
    client.core.receive(bytes(rst_stream(1, 8)))
    assert 0 == client.ledger.held


async def test_nothing_is_inflated_where_there_is_no_room() -> None:
    client = Client(streaming=False)
    client.send(prefixed(bytes(1000), compressed=True), end=True)
    client.core.account.hold(LIMIT)

    with pytest.raises(GRPCError, match="max_held_bytes"):
        await client.read()


async def test_a_short_message_counts_while_its_request_waits() -> None:
    client = Client(streaming=False)
    client.send(prefixed(bytes(1000)), end=True)

    assert PREFIX_BYTES + 1000 == client.ledger.held
    client.core.receive(bytes(rst_stream(1, 8)))
    assert 0 == client.ledger.held


async def test_a_short_message_counts_until_its_request_ends() -> None:
    client = Client(streaming=False)
    client.send(prefixed(bytes(1000)))

    assert PREFIX_BYTES + 1000 == client.ledger.held
    client.core.receive(bytes(rst_stream(1, 8)))
    assert 0 == client.ledger.held
