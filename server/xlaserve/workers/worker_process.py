"""A worker seen from the parent: its process, channel and connections."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from xlaserve.concurrency.control_plane import OF_MODELS, ChangeKind
from xlaserve.process.children import start_deaf
from xlaserve.process.output import descriptors
from xlaserve.process.silence import Silence, is_stopped
from xlaserve.workers.channel import Channel, ChannelError, from_worker
from xlaserve.workers.handing import handing_pair
from xlaserve.workers.messages import (
    Alive,
    Begin,
    Connections,
    Did,
    Done,
    Failed,
    FromWorker,
    Here,
    Noted,
    Part,
    Ping,
    Reply,
)

BRIDGES = "bridges"
"""Stands for the setting of an endpoint, for ends of bridges."""
COMMAND = (sys.executable, "-m", "xlaserve.workers.worker")
IMPORTS = "imports"
"""The third argument of a process that is started ahead."""


class WorkerGone(Exception):
    """A worker ends before it has answered."""


@dataclass(frozen=True, slots=True)
class Role:
    """The part of the server that a worker is started as."""

    worker: int
    settings: Mapping[str, Any]
    endpoints: Sequence[tuple[str, str]]
    """Setting and address of each."""
    answer_seconds: float
    """Seconds without a sign of life after which it is replaced."""
    quotas: int = -1
    """The descriptor of the table of quotas; -1 for none."""
    part: Part = Part.WORKER
    board: int = -1
    """The descriptor of the board of the workers; -1 for none."""

    @property
    def has_bridges(self) -> bool:
        """Tell whether it is connected with other processes than the parent."""
        return self.part is not Part.WORKER or self.board >= 0


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A process that was started; it lives as long as its channel."""

    role: Role
    process: "subprocess.Popen[bytes]"
    channel: "Channel[FromWorker]"
    begin: Begin
    """Its first message."""
    handing: Mapping[str, socket.socket]
    its_ends: Mapping[str, socket.socket]
    """The worker's ends of those: what it has not taken can be taken back."""
    silence: Silence
    is_listening: bool = False
    is_ready: bool = False
    is_silent: bool = False
    """Whether it gives no sign of life; nothing is handed to it then."""
    is_pinged: bool = False
    """Whether it was asked for a sign of life, and has not answered."""
    makes_changes: bool = False
    """Whether its control plane is there: it serves, or is about to."""
    is_ready_here: bool = False
    """Whether it says that it is ready."""
    failure: str = ""
    """Why it says that it ends."""
    _open: int = 0
    _received: int = 0
    _handed: int = 0
    _expected: dict[tuple[str, int], asyncio.Future[Any]] = field(default_factory=dict)

    @classmethod
    async def start(cls, role: Role) -> "WorkerProcess":
        """Start the process, and tell it who it is; raises OSError and ChannelError."""
        worker = await cls.ahead(role, imports=False)
        try:
            worker.channel.send(worker.begin)
        except ChannelError:
            worker.kill()
            await worker.ended()
            raise
        return worker

    @classmethod
    async def ahead(cls, role: Role, *, imports: bool = True) -> "WorkerProcess":
        """Start the process, which waits to be told who it is; raises OSError.

        With `imports` it has imported JAX by then.
        """
        with ExitStack() as theirs, ExitStack() as ours:
            end, its_end = socket.socketpair()
            ours.callback(end.close)
            theirs.callback(its_end.close)
            handing, its_ends, endpoints = {}, {}, []
            for setting, address in role.endpoints:
                one, other = handing_pair()
                ours.callback(one.close)
                ours.callback(other.close)
                handing[setting], its_ends[setting] = one, other
                endpoints.append((setting, address, other.fileno()))
            bridges = -1
            if role.has_bridges:
                handing[BRIDGES], other = handing_pair()
                ours.callback(handing[BRIDGES].close)
                theirs.callback(other.close)
                bridges = other.fileno()
            outputs = descriptors()
            given = its_end.fileno(), *(e[2] for e in endpoints), *outputs
            given = *given, role.quotas, role.board, bridges
            arguments = [str(its_end.fileno()), str(os.getpid()), *([IMPORTS] if imports else ())]
            process = _started(arguments, [one for one in given if one >= 0])
            channel = await Channel.open(end, from_worker())
            begin = Begin(
                role.worker,
                dict(role.settings),
                endpoints,
                role.answer_seconds,
                role.quotas,
                role.part,
                bridges,
                role.board,
                outputs,
            )
            ours.pop_all()
        return cls(role, process, channel, begin, handing, its_ends, Silence(role.answer_seconds))

    @property
    def may_begin(self) -> bool:
        """Tell whether a process that was started ahead waits to be told who it is."""
        return self.process.poll() is None and not is_stopped(self.process.pid)

    # --- connections ---

    @property
    def takes_connections(self) -> bool:
        """Tell whether connections may be handed to it."""
        takes = self.is_listening and self.role.part is not Part.ENGINE
        return takes and not self.is_silent

    def makes(self, kind: ChangeKind) -> bool:
        """Tell whether it makes changes of a kind: models are none of a front end's."""
        return self.role.part is not Part.FRONT_END or kind not in OF_MODELS

    @property
    def connections(self) -> int:
        """Return the connections that it has, with those on their way to it."""
        return self._open + self._handed - self._received

    def hand_bridge(self, end: socket.socket) -> None:
        """Hand it an end of a bridge; one that has ended does not take it."""
        with suppress(OSError):
            socket.send_fds(self.handing[BRIDGES], [b"b"], [end.fileno()])

    def hand(self, setting: str, connection: socket.socket) -> bool:
        """Hand it a connection; false where it takes none now."""
        try:
            socket.send_fds(self.handing[setting], [b"c"], [connection.fileno()])
        except OSError:
            return False
        self._handed += 1
        return True

    def take_back(self) -> Iterator[tuple[str, socket.socket]]:
        """Yield the connections that it was handed and has not taken, each with its setting."""
        for setting, end in self.its_ends.items():
            while True:
                try:
                    _, descriptors, _, _ = socket.recv_fds(end, 1, 1, socket.MSG_CMSG_CLOEXEC)
                except OSError:  # BlockingIOError: there are no more
                    break
                if not descriptors:
                    break
                self._handed -= 1
                yield setting, socket.socket(fileno=descriptors[0])

    def ping(self) -> None:
        """Ask it for a sign of life, unless it was asked already."""
        if not self.is_pinged:
            self.is_pinged = True
            self.tell(Ping())

    # --- messages ---

    async def expect(self, message: msgspec.Struct, key: tuple[str, int]) -> Any:
        """Send a message, and return what `answered` is given under a key; raises WorkerGone."""
        answer = self._expected[key] = asyncio.get_running_loop().create_future()
        try:
            self.channel.send(message)
            return await answer
        except ChannelError as error:
            raise WorkerGone(str(error)) from error
        finally:
            self._expected.pop(key, None)

    def heard(self, message: FromWorker) -> None:
        """Handle a message of the worker: its state, or an expected reply."""
        self.silence.heard()
        match message:
            case Connections(open_, received):
                self._open, self._received = open_, received
            case Alive():
                self.is_pinged = False
            case Here(is_ready):
                self.is_ready_here = is_ready
            case Failed(_, text):
                self.failure = text
            case Done(number):
                self._answered(("done", number), message)
            case Did(number):
                self._answered(("did", number), message)
            case Noted(number):
                self._answered(("noted", number), message)
            case Reply(number):
                self._answered(("reply", number), message)
            case _:
                pass

    def _answered(self, key: tuple[str, int], message: msgspec.Struct) -> None:
        answer = self._expected.get(key)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message; one that is about to end does not hear it."""
        with suppress(ChannelError):
            self.channel.send(message)

    # --- shutdown ---

    def kill(self) -> None:
        """End it now."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    async def ended(self) -> str:
        """Return why it ended, once it has; its connections are closed then."""
        self.is_listening = self.is_ready = self.makes_changes = False
        for answer in self._expected.values():
            if not answer.done():
                answer.set_exception(WorkerGone("it ended"))
        for end in (*self.handing.values(), *self.its_ends.values()):
            end.close()
        self.channel.close()
        status = await asyncio.to_thread(self.process.wait)
        if self.failure:
            return self.failure
        if status < 0:
            return f"it ended by signal {signal.Signals(-status).name}"
        return f"it ended with exit status {status}"


def _started(arguments: Sequence[str], given: Sequence[int]) -> "subprocess.Popen[bytes]":
    # Not by the event loop: uvloop has what it starts hear every signal.
    return start_deaf(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=given,
        start_new_session=True,
    )
