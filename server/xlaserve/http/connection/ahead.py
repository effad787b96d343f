"""The bounded buffer of pipelined bytes."""

import asyncio

_AHEAD_BYTES = 64 << 10
"""Buffered bytes above which the connection stops reading; the last read may exceed it."""


class Ahead:
    """Buffers pipelined bytes and pauses reading above the limit."""

    __slots__ = ("_is_paused", "_transport", "data")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.data = bytearray()
        self._is_paused = False

    def add(self, data: bytes | memoryview) -> None:
        """Append bytes, and pause reading above the limit."""
        self.data += data
        if len(self.data) > _AHEAD_BYTES:
            # Pause again each time: a request body resumes reading once it has been consumed.
            self._is_paused = True
            self._transport.pause_reading()

    def take(self, size: int | None) -> bytes:
        """Remove and return the first `size` bytes, or all if `size` is None."""
        taken = bytes(self.data if size is None else self.data[:size])
        del self.data[: len(taken)]
        if self._is_paused and len(self.data) <= _AHEAD_BYTES:
            self._is_paused = False
            self._transport.resume_reading()
        return taken

    def clear(self) -> None:
        """Discard all buffered bytes, because the connection is closing."""
        self.data.clear()
