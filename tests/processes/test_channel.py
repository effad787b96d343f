"""The channel between processes accepts only its own messages, and is bounded."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from xlaserve.concurrency.control_plane import ChangeKind, ChangeText
from xlaserve.workers import channel as channels
from xlaserve.workers.channel import Channel, ChannelError, from_worker
from xlaserve.workers.messages import Ask, Begin, FromWorker, Ready


@pytest.fixture(name="ends")
async def two_ends() -> AsyncIterator[tuple["Channel[FromWorker]", socket.socket]]:
    """A channel, and the raw socket at its other end."""
    ours, theirs = socket.socketpair()
    channel = await Channel.open(ours, from_worker())
    theirs.setblocking(False)
    yield channel, theirs
    channel.close()
    theirs.close()


def frame(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


async def test_a_message_arrives_as_it_was_sent(
    ends: tuple["Channel[FromWorker]", socket.socket],
) -> None:
    """In order, and with all of their fields."""
    channel, other = ends
    ask = Ask(7, ChangeText(ChangeKind.LOAD, "m", {"config": "{}"}))
    other.send(frame(msgspec.json.encode(ask)) + frame(msgspec.json.encode(Ready())))

    assert [ask, Ready()] == [await channel.receive(), await channel.receive()]


async def test_an_end_that_is_gone_with_messages_unread_is_told_once(
    ends: tuple["Channel[FromWorker]", socket.socket],
) -> None:
    """The system reports "reset": asyncio must not report it again when the process ends."""
    channel, other = ends
    channel.send(Ready())
    await channel._writer.drain()
    other.close()
    with pytest.raises(ChannelError, match="the other end closed the channel") as raised:
        await channel.receive()
    closed: Any = channel._writer._protocol._closed  # type: ignore[attr-defined]

    assert isinstance(raised.value.__cause__, ConnectionResetError)
    assert not closed._log_traceback


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"not json",
        b'{"type": "Nothing"}',
        b'{"type": "Ready", "more": 1}',
        # Only the parent may send this.
        msgspec.json.encode(Begin(0, {}, [], 0)),
        b'{"type": "Ask", "number": 1, "change": {"kind": "x", "subject": "m", "arguments": {}}}',
    ],
)
async def test_what_is_no_message_ends_the_channel(
    ends: tuple["Channel[FromWorker]", socket.socket], data: bytes
) -> None:
    """No attempt is made to interpret it."""
    channel, other = ends
    other.send(frame(data))

    with pytest.raises(ChannelError):
        await channel.receive()


async def test_a_message_that_is_too_long_is_not_received(
    ends: tuple["Channel[FromWorker]", socket.socket],
) -> None:
    """It is refused by its length alone: no memory is allocated for it."""
    channel, other = ends
    other.send(struct.pack("<I", channels.LIMIT_MESSAGE_BYTES + 1))

    with pytest.raises(ChannelError, match="bytes"):
        await channel.receive()


async def test_an_end_that_does_not_read_is_given_up(
    ends: tuple["Channel[FromWorker]", socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output queued for it is bounded."""
    channel, _ = ends
    monkeypatch.setattr(channels, "LIMIT_PENDING_BYTES", 1 << 20)
    message = Ask(1, ChangeText(ChangeKind.LOAD, "m" * 60_000, {}))

    def fill() -> None:
        for _ in range(100):
            channel.send(message)

    with pytest.raises(ChannelError, match="is not reading"):
        fill()
    await asyncio.sleep(0)
    with pytest.raises(ChannelError):
        channel.send(message)
