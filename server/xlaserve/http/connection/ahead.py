"""The bounded buffer of bytes that a client sent ahead."""

import asyncio

_AHEAD_BYTES = 64 << 10
"""Bytes buffered before a connection reads no more; one read goes beyond it."""


class Ahead:
    """Pipelined bytes; above the limit the connection stops reading."""

    __slots__ = ("_is_paused", "_transport", "data")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.data = bytearray()
        self._is_paused = False

    def add(self, data: bytes | memoryview) -> None:
        """Append bytes to the kept ones."""
        self.data += data
        if len(self.data) > _AHEAD_BYTES:
            # Each time: a body, too, has reading resumed, when all of it was read.
            self._is_paused = True
            self._transport.pause_reading()

    def take(self, size: int | None) -> bytes:
        """Return the first bytes, or all of them, and keep them no longer."""
        taken = bytes(self.data if size is None else self.data[:size])
        del self.data[: len(taken)]
        if self._is_paused and len(self.data) <= _AHEAD_BYTES:
            self._is_paused = False
            self._transport.resume_reading()
        return taken

    def clear(self) -> None:
        """Drop all of it; nothing is read of a connection that ends."""
        self.data.clear()
