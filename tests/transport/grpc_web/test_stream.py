"""A gRPC-Web request as a stream: the messages it passes to methods, and their lifetime."""

from typing import Any, cast
from unittest.mock import Mock

from xlaserve.grpc.http2.messages import PREFIX
from xlaserve.grpc_web.stream import WebStream

LENGTHS = (3, 0, 5)


def body() -> bytearray:
    return bytearray(b"".join(PREFIX.pack(0, length) + b"m" * length for length in LENGTHS))


async def given(whole: bytearray, *, streaming: bool) -> list[Any]:
    """Return what a method reads until the end of the stream: prefixes and messages alternate."""
    exchange = Mock()

    async def read() -> memoryview:
        return memoryview(whole)

    exchange.read = read
    stream = WebStream(
        exchange,
        cast("Any", Mock(max_message_bytes=10)),
        Mock(),
        deadline=None,
        is_text=False,
        streaming=streaming,
    )
    found: list[Any] = []
    while not found or len(found[-1]):
        found.append(await stream.recv_data(5))
        if len(found[-1]) and PREFIX.unpack(found[-1])[1]:
            found.append(await stream.recv_data(PREFIX.unpack(found[-1])[1]))
    return found


async def test_messages_of_a_stream_outlive_its_body() -> None:
    """A method may keep one of a thousand messages; a view would keep the whole body."""
    whole = body()
    found = await given(whole, streaming=True)
    whole[:] = bytes(len(whole))

    assert [PREFIX.pack(0, 3), b"mmm", PREFIX.pack(0, 0), PREFIX.pack(0, 5), b"mmmmm", b""] == found


async def test_the_only_message_is_not_copied() -> None:
    whole = body()[:8]
    _, message, _ = await given(whole, streaming=False)

    assert b"mmm" == message
    assert message.obj is whole
