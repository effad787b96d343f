"""The server that this process replaces, which hands over its listening sockets and then drains.

Both processes hold the same listening sockets, so no waiting connection is lost.
"""

import asyncio
import json
import os
import select
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import Any, BinaryIO, Self

from xlaserve.process import HANDED

TAKEN_OVER = b"T"
"""Message from a replacement that accepts connections."""
WANTED = b"W"
"""Message from a replacement that has loaded the configured models, to request CHANGES."""
CHANGES = b"C"
"""Reply to WANTED, with the descriptor of a file that records the changes made by clients."""


class SharedSocket:
    """A listening socket shared with another process; it accepts only while this one may."""

    def __init__(self, listening: socket.socket, *, waits: bool = False) -> None:
        """With `waits`, no connection is accepted until `open`."""
        self.listening = listening
        self.may_accept = not waits
        """Whether this process may accept connections: from `open` to `shut`."""
        # The event loop polls this epoll descriptor, to which `open` adds the socket.
        self._poll = select.epoll() if waits else None

    def open(self) -> None:
        """Start accepting connections."""
        self.may_accept = True
        if self._poll is not None:
            self._poll.register(self.listening.fileno(), select.EPOLLIN)

    def shut(self) -> None:
        """Stop accepting connections, and leave them to the other process."""
        self.may_accept = False

    def fileno(self) -> int:
        """Return a descriptor that is readable when a connection waits; -1 once closed."""
        return self.listening.fileno() if self._poll is None else self._poll.fileno()

    def setblocking(self, flag: bool, /) -> None:
        """Choose whether `accept` blocks."""
        self.listening.setblocking(flag)

    def accept(self) -> tuple[socket.socket, Any]:
        """Return a connection and its peer's address.

        Raises BlockingIOError if none waits, or if this process may not accept now.
        """
        if not self.may_accept:
            raise BlockingIOError
        return self.listening.accept()

    def close(self) -> None:
        """Close the socket in this process."""
        if self._poll is not None and not self._poll.closed:
            self._poll.close()
            # `fileno` of a closed epoll would raise.
            self._poll = None
        self.listening.close()


class Predecessor:
    """The process that this one replaces, with its sockets; it serves until `take_over`."""

    def __init__(
        self, channel: socket.socket, sockets: Mapping[str, SharedSocket], *, hands_changes: bool
    ) -> None:
        self._channel = channel
        self._sockets = sockets
        self._hands_changes = hands_changes
        self.has_taken_over = False

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Self | None:
        """Read the hand-over from the environment; None if this process replaces no other."""
        text = environment.pop(HANDED, "")
        if not text:
            return None
        handover = json.loads(text)
        channel, *sockets = (
            socket.socket(fileno=number)
            for number in (handover["channel"], *handover["sockets"].values())
        )
        for one in (channel, *sockets):
            os.set_inheritable(one.fileno(), False)
            one.setblocking(False)
        shared = [SharedSocket(one, waits=True) for one in sockets]
        named = dict(zip(handover["sockets"], shared, strict=True))
        return cls(channel, named, hands_changes=bool(handover.get("changes")))

    def socket_of(self, setting: str) -> SharedSocket | None:
        """Return the listening socket of an endpoint, or None if it was not handed over."""
        return self._sockets.get(setting)

    async def changes(self) -> BinaryIO | None:
        """Return the predecessor's record of changes by clients; it accepts no further changes.

        Returns None if the predecessor does not support this. Raises ConnectionError if it gives no
        valid reply.
        """
        if not self._hands_changes:
            return None
        self._channel.send(WANTED)
        await _readable(self._channel)
        message, descriptors, _, _ = socket.recv_fds(self._channel, len(CHANGES), 1)
        if message != CHANGES or len(descriptors) != 1:
            raise ConnectionError("it did not send them")
        os.set_inheritable(descriptors[0], False)
        return open(descriptors[0], "rb")  # noqa: ASYNC230, PTH123, an open descriptor

    def take_over(self) -> None:
        """Start accepting connections, and tell the predecessor to drain; idempotent."""
        if self.has_taken_over:
            return
        self.has_taken_over = True
        for one in self._sockets.values():
            one.open()
        # The predecessor may have died.
        with suppress(OSError):
            self._channel.send(TAKEN_OVER)
        self._channel.close()


def handed(channel: socket.socket, sockets: Mapping[str, socket.socket]) -> dict[str, str]:
    """Return the environment variables for a replacement that inherits these sockets."""
    numbers = {setting: one.fileno() for setting, one in sockets.items()}
    handover = {"channel": channel.fileno(), "sockets": numbers, "changes": True}
    return {HANDED: json.dumps(handover)}


async def _readable(channel: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(channel.fileno(), readable.set_result, None)
    try:
        await readable
    finally:
        loop.remove_reader(channel.fileno())
