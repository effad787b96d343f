"""A worker as the parent sees it: its process, its channel, and the connections it has."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from xlaserve.processes.channel import Channel, ChannelError, from_worker
from xlaserve.processes.handing import handing_pair
from xlaserve.processes.messages import Begin, FromWorker

COMMAND = (sys.executable, "-m", "xlaserve.processes.worker")


@dataclass(frozen=True, slots=True)
class Role:
    """The part of the server that a worker is started as."""

    worker: int
    settings: Mapping[str, Any]
    endpoints: Sequence[tuple[str, str]]
    """Setting and address of each."""
    watchdog_seconds: float
    kept_open: Sequence[int] = ()
    """Descriptors that the settings name, as of an access log."""


@dataclass(slots=True)
class WorkerProcess:
    """A process that was started; it lives as long as its channel."""

    role: Role
    process: asyncio.subprocess.Process
    channel: "Channel[FromWorker]"
    handing: Mapping[str, socket.socket]
    is_listening: bool = False
    is_ready: bool = False
    alive_at: float = field(default_factory=time.monotonic)
    """When it gave its last sign of life."""
    failure: str = ""
    """Why it says that it ends."""
    _open: int = 0
    _received: int = 0
    _handed: int = 0

    @classmethod
    async def start(cls, role: Role) -> "WorkerProcess":
        """Start the process, and tell it who it is; raises OSError."""
        with ExitStack() as theirs, ExitStack() as ours:
            end, its_end = socket.socketpair()
            ours.callback(end.close)
            theirs.callback(its_end.close)
            handing, endpoints = {}, []
            for setting, address in role.endpoints:
                one, other = handing_pair()
                ours.callback(one.close)
                theirs.callback(other.close)
                handing[setting] = one
                endpoints.append((setting, address, other.fileno()))
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                str(its_end.fileno()),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[its_end.fileno(), *(e[2] for e in endpoints), *role.kept_open],
                # What a terminal sends to all processes of the foreground is for the parent.
                start_new_session=True,
            )
            channel = await Channel.open(end, from_worker())
            begin = Begin(role.worker, dict(role.settings), endpoints, role.watchdog_seconds)
            channel.send(begin)
            ours.pop_all()
        return cls(role, process, channel, handing)

    # --- connections ---

    @property
    def takes_connections(self) -> bool:
        """Tell whether connections may be handed to it."""
        return self.is_listening

    @property
    def connections(self) -> int:
        """Return the connections that it has, with those on their way to it."""
        return self._open + self._handed - self._received

    def counted(self, open_: int, received: int) -> None:
        """Take note of what it says it has."""
        self._open, self._received = open_, received

    def hand(self, setting: str, connection: socket.socket) -> bool:
        """Hand it a connection; false where it takes none now."""
        try:
            socket.send_fds(self.handing[setting], [b"c"], [connection.fileno()])
        except OSError:
            return False
        self._handed += 1
        return True

    # --- the end ---

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message; one that is about to end does not hear it."""
        with suppress(ChannelError):
            self.channel.send(message)

    def kill(self) -> None:
        """End it now."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    async def ended(self) -> str:
        """Return why it ended, once it has; its connections are closed then."""
        self.is_listening = self.is_ready = False
        for end in self.handing.values():
            end.close()
        self.channel.close()
        status = await self.process.wait()
        if self.failure:
            return self.failure
        if status < 0:
            return f"it ended by signal {signal.Signals(-status).name}"
        return f"it ended with exit status {status}"
