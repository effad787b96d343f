"""The server that this one replaces: hands over its sockets and learns when to drain.

Both processes have the same sockets, so that connections which wait to be accepted wait for either.
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
"""The message of a replacement on its channel, sent once it accepts connections."""
WANTED = b"W"
"""Message of a replacement that has loaded the configured models: asks for CHANGES."""
CHANGES = b"C"
"""The answer to it, with the descriptor of a file: what clients have changed."""


class SharedSocket:
    """A listening socket that another process may have too; it accepts only while it may."""

    def __init__(self, listening: socket.socket, *, waits: bool = False) -> None:
        """With `waits`, no connection is accepted before `open`."""
        self.listening = listening
        self.may_accept = not waits
        """Whether the endpoint is this process's, from `open` to `shut`."""
        # An event loop watches this descriptor, which is readable when what it watches is.
        self._poll = select.epoll() if waits else None

    def open(self) -> None:
        """Accept from now on."""
        self.may_accept = True
        if self._poll is not None:
            self._poll.register(self.listening.fileno(), select.EPOLLIN)

    def shut(self) -> None:
        """Stop accepting: the accept queue belongs to the other process."""
        self.may_accept = False

    def fileno(self) -> int:
        """Return the descriptor that is readable when a connection waits; -1 once closed."""
        return self.listening.fileno() if self._poll is None else self._poll.fileno()

    def setblocking(self, flag: bool, /) -> None:
        """Choose whether `accept` waits."""
        self.listening.setblocking(flag)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; return it with its peer's address, as a listening socket does."""
        if not self.may_accept:
            raise BlockingIOError
        return self.listening.accept()

    def close(self) -> None:
        """Close it in this process."""
        if self._poll is not None and not self._poll.closed:
            self._poll.close()
            # Of a closed one `fileno` would raise.
            self._poll = None
        self.listening.close()


class Predecessor:
    """The sockets that it handed over; connections wait for it until `take_over`."""

    def __init__(
        self, channel: socket.socket, sockets: Mapping[str, SharedSocket], *, hands_changes: bool
    ) -> None:
        self._channel = channel
        self._sockets = sockets
        self._hands_changes = hands_changes
        self.has_taken_over = False

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Self | None:
        """Take the predecessor's hand-over from the environment, or None."""
        text = environment.pop(HANDED, "")
        if not text:
            return None
        said = json.loads(text)
        channel, *sockets = (
            socket.socket(fileno=number) for number in (said["channel"], *said["sockets"].values())
        )
        for one in (channel, *sockets):
            os.set_inheritable(one.fileno(), False)
            one.setblocking(False)
        shared = [SharedSocket(one, waits=True) for one in sockets]
        named = dict(zip(said["sockets"], shared, strict=True))
        return cls(channel, named, hands_changes=bool(said.get("changes")))

    def socket_of(self, setting: str) -> SharedSocket | None:
        """Return the listening socket of an endpoint."""
        return self._sockets.get(setting)

    async def changes(self) -> BinaryIO | None:
        """Return the file of the predecessor's changes by clients; it accepts no further ones.

        None of a server that hands nothing over. Raises ConnectionError where it does not answer.
        """
        if not self._hands_changes:
            return None
        self._channel.send(WANTED)
        await _readable(self._channel)
        said, descriptors, _, _ = socket.recv_fds(self._channel, len(CHANGES), 1)
        if said != CHANGES or len(descriptors) != 1:
            raise ConnectionError("it said nothing of them")
        os.set_inheritable(descriptors[0], False)
        return open(descriptors[0], "rb")  # noqa: ASYNC230, PTH123, an open descriptor

    def take_over(self) -> None:
        """Accept connections, and tell the predecessor, which then drains; idempotent."""
        if self.has_taken_over:
            return
        self.has_taken_over = True
        for one in self._sockets.values():
            one.open()
        # It may have died meanwhile.
        with suppress(OSError):
            self._channel.send(TAKEN_OVER)
        self._channel.close()


def handed(channel: socket.socket, sockets: Mapping[str, socket.socket]) -> dict[str, str]:
    """Return the environment of a replacement that inherits these sockets."""
    numbers = {setting: one.fileno() for setting, one in sockets.items()}
    said = {"channel": channel.fileno(), "sockets": numbers, "changes": True}
    return {HANDED: json.dumps(said)}


async def _readable(channel: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(channel.fileno(), readable.set_result, None)
    try:
        await readable
    finally:
        loop.remove_reader(channel.fileno())
