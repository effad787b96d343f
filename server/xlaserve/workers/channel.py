"""The channel between parent and worker: typed messages over a socket pair."""

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Generic, Self, TypeVar

import msgspec

from xlaserve.workers.messages import FromWorker, ToWorker

LIMIT_MESSAGE_BYTES = 32 << 20
"""Maximum size of a message; longer data travels in a file."""
LIMIT_PENDING_BYTES = 64 << 20
"""Maximum amount of unsent data if the peer does not read; beyond it the channel is closed."""
_LENGTH = struct.Struct("<I")

Incoming = TypeVar("Incoming")


class ChannelError(Exception):
    """The peer is gone, does not read, or sent an invalid message."""


class Channel(Generic[Incoming]):
    """One end of the channel. Any task of its event loop may send; one task receives."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: "msgspec.json.Decoder[Incoming]",
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._encoder = msgspec.json.Encoder()

    @classmethod
    async def open(cls, end: socket.socket, decoder: "msgspec.json.Decoder[Incoming]") -> Self:
        """Open a channel over one end of a socket pair; closing the channel closes the socket."""
        reader, writer = await asyncio.open_connection(sock=end)
        return cls(reader, writer, decoder)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, in order and without waiting. Raises ChannelError.

        Unsent data is bounded by LIMIT_PENDING_BYTES, because the peer may have stopped reading.
        """
        data = self._encoder.encode(message)
        if len(data) > LIMIT_MESSAGE_BYTES:
            raise ChannelError(
                f"a message of {len(data)} bytes exceeds the limit of {LIMIT_MESSAGE_BYTES}"
            )
        transport = self._writer.transport
        if transport.is_closing():
            raise ChannelError("the other end closed the channel")
        if transport.get_write_buffer_size() + len(data) > LIMIT_PENDING_BYTES:
            transport.abort()
            raise ChannelError("the other end is not reading")
        self._writer.write(_LENGTH.pack(len(data)) + data)

    async def receive(self) -> Incoming:
        """Return the next message; raises ChannelError if it is invalid or the peer has closed."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > LIMIT_MESSAGE_BYTES:
                raise ChannelError(
                    f"a message of {length} bytes exceeds the limit of {LIMIT_MESSAGE_BYTES}"
                )
            return self._decoder.decode(await self._reader.readexactly(length))
        except asyncio.IncompleteReadError as error:
            raise ChannelError("the other end closed the channel") from error
        except OSError as error:
            # Retrieve the exception, or asyncio may report it as unhandled when the process exits.
            with suppress(OSError):
                await self._writer.wait_closed()
            raise ChannelError("the other end closed the channel") from error
        except msgspec.DecodeError as error:
            raise ChannelError(f"a message that cannot be read, {error}") from error

    async def flush(self) -> None:
        """Wait until everything was sent, or the peer has closed."""
        try:
            await self._writer.drain()
            self._writer.write_eof()
        except OSError:
            return

    def close(self) -> None:
        """Close this end; the peer receives an end of file."""
        self._writer.close()


def from_worker() -> "msgspec.json.Decoder[FromWorker]":
    """Return the decoder of messages from workers."""
    return msgspec.json.Decoder(FromWorker)


def to_worker() -> "msgspec.json.Decoder[ToWorker]":
    """Return the decoder of messages from the parent."""
    return msgspec.json.Decoder(ToWorker)
