"""What a connection writes and when: answers leave as soon as they exist, several together."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, cast

from support.frames import PREFACE, data, headers, literals, settings

from xlaserve.grpc.http2.busy_poll import BusyPoll
from xlaserve.grpc.http2.connection import ReceiveBuffer, ServerConnection
from xlaserve.grpc.http2.limits import Http2Limits, Shared
from xlaserve.grpc.http2.messages import Placement
from xlaserve.grpc.http2.protocol import Http2Protocol
from xlaserve.grpc.http2.stream import ServerStream
from xlaserve.net.ledger import Ledger
from xlaserve.net.memory import MessageMemory

REQUEST = literals([(":method", "POST"), (":scheme", "http"), (":path", "/a")])
MESSAGE = b"\0\0\0\0\0"
HEAD, TRAILERS = b"\x88", literals([("grpc-status", "0")])


class Written:
    """A transport that records the data of each write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, name: str) -> None: ...

    def is_closing(self) -> bool:
        return False

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.writes.append(b"".join(parts))


class Server:
    """The host of one connection, which answers with the given callback."""

    message_first = True
    placement: Placement | None = None

    def __init__(self, begin: Callable[[ServerStream], None]) -> None:
        self._begin = begin
        self.transport = Written()
        self.protocol = Http2Protocol(self, ReceiveBuffer(), BusyPoll(0, lambda call: None))
        self.protocol.connection_made(cast(Any, self.transport))
        self.receive(PREFACE + bytes(settings()))
        self.transport.writes.clear()

    def begin(self, stream: ServerStream) -> None:
        self._begin(stream)

    def connect(self, protocol: Http2Protocol, transport: asyncio.Transport) -> ServerConnection:
        shared = Shared(Ledger(1 << 30), MessageMemory(0))
        limits = Http2Limits()
        return ServerConnection(limits, lambda head: self, shared, wake=protocol.wake)

    def admit(self, protocol: Http2Protocol) -> bool:
        return True

    def disconnected(self, protocol: Http2Protocol) -> None: ...

    def receive(self, octets: bytes) -> None:
        self.protocol.get_buffer(-1)[: len(octets)] = octets
        self.protocol.buffer_updated(len(octets))

    def requests(self, *numbers: int) -> None:
        self.receive(
            b"".join(
                bytes(headers(number, REQUEST)) + bytes(data(number, MESSAGE, end_stream=True))
                for number in numbers
            )
        )


def answer(stream: ServerStream) -> None:
    stream.answer(HEAD, [MESSAGE], len(MESSAGE), TRAILERS)


def answer_soon(stream: ServerStream) -> None:
    asyncio.get_running_loop().call_soon(answer, stream)


async def test_answers_of_one_pass_leave_in_one_write() -> None:
    server = Server(answer)

    server.requests(1, 3, 5)

    assert len(server.transport.writes) == 1


async def test_answers_of_the_next_turn_leave_in_that_turn() -> None:
    """Another loop iteration would poll the sockets in vain."""
    server = Server(answer_soon)

    server.requests(1, 3, 5)
    assert not server.transport.writes
    await asyncio.sleep(0)

    assert len(server.transport.writes) == 1


async def test_an_answer_that_takes_longer_leaves_by_itself() -> None:
    held: list[ServerStream] = []
    server = Server(held.append)

    server.requests(1)
    await asyncio.sleep(0)
    answer(held[0])
    await asyncio.sleep(0)

    assert len(server.transport.writes) == 1
