"""A worker as seen by the parent: its process, channel and connections."""

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
from xlaserve.process.children import start_shielded
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
"""Key used in place of an endpoint's setting for handing over bridges."""
COMMAND = (sys.executable, "-P", "-m", "xlaserve.workers.worker")
IMPORTS = "imports"
"""Third argument of a spare process."""


class WorkerGone(Exception):
    """The worker exited before it answered."""


@dataclass(frozen=True, slots=True)
class Role:
    """The configuration with which a worker is started."""

    worker: int
    settings: Mapping[str, Any]
    endpoints: Sequence[tuple[str, str]]
    """Setting and address of each endpoint."""
    answer_seconds: float
    """After this many seconds without a response the worker is replaced."""
    quotas: int = -1
    """Descriptor of the quota table; -1 if there is none."""
    part: Part = Part.WORKER
    board: int = -1
    """Descriptor of the workers' board; -1 if there is none."""

    @property
    def has_bridges(self) -> bool:
        """Tell whether the process has bridges to other workers."""
        return self.part is not Part.WORKER or self.board >= 0


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A started worker process. It is considered alive as long as its channel is open."""

    role: Role
    process: "subprocess.Popen[bytes]"
    channel: "Channel[FromWorker]"
    begin: Begin
    """The first message to the worker."""
    handing: Mapping[str, socket.socket]
    its_ends: Mapping[str, socket.socket]
    """The worker's ends of the pairs in `handing`, to take back connections that it has not
    taken."""
    silence: Silence
    is_listening: bool = False
    is_ready: bool = False
    is_silent: bool = False
    """Whether the worker is unresponsive, so that it gets no connections."""
    is_pinged: bool = False
    """Whether the last ping is unanswered."""
    makes_changes: bool = False
    """Whether the worker is able to make changes."""
    is_ready_here: bool = False
    """Whether the worker reports itself ready."""
    failure: str = ""
    """Why the worker exits, if known."""
    _open: int = 0
    _received: int = 0
    _handed: int = 0
    _expected: dict[tuple[str, int], asyncio.Future[Any]] = field(default_factory=dict)

    @classmethod
    async def start(cls, role: Role) -> "WorkerProcess":
        """Start and configure a process; raises OSError and ChannelError."""
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
        """Start a process without configuring it; raises OSError.

        With `imports`, the process imports JAX while it waits.
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
        """Tell whether a spare process is running and not stopped by a signal."""
        return self.process.poll() is None and not is_stopped(self.process.pid)

    # --- Connections ---

    @property
    def takes_connections(self) -> bool:
        """Tell whether connections may be handed to the worker."""
        takes = self.is_listening and self.role.part is not Part.ENGINE
        return takes and not self.is_silent

    def makes(self, kind: ChangeKind) -> bool:
        """Tell whether the worker applies this kind of change; front ends do not change models."""
        return self.role.part is not Part.FRONT_END or kind not in OF_MODELS

    @property
    def connections(self) -> int:
        """Return the number of the worker's connections, including those in transit."""
        return self._open + self._handed - self._received

    def hand_bridge(self, end: socket.socket) -> None:
        """Hand over an end of a bridge; ignored if the process has exited."""
        with suppress(OSError):
            socket.send_fds(self.handing[BRIDGES], [b"b"], [end.fileno()])

    def hand(self, setting: str, connection: socket.socket) -> bool:
        """Hand over a connection; returns False if that fails."""
        try:
            socket.send_fds(self.handing[setting], [b"c"], [connection.fileno()])
        except OSError:
            return False
        self._handed += 1
        return True

    def take_back(self) -> Iterator[tuple[str, socket.socket]]:
        """Yield the connections handed over but not yet taken, each with its setting."""
        for setting, end in self.its_ends.items():
            while True:
                try:
                    _, descriptors, _, _ = socket.recv_fds(end, 1, 1, socket.MSG_CMSG_CLOEXEC)
                except OSError:  # BlockingIOError: no more connections
                    break
                if not descriptors:
                    break
                self._handed -= 1
                yield setting, socket.socket(fileno=descriptors[0])

    def ping(self) -> None:
        """Send a ping, unless the last one is unanswered."""
        if not self.is_pinged:
            self.is_pinged = True
            self.tell(Ping())

    # --- Messages ---

    async def expect(self, message: msgspec.Struct, key: tuple[str, int]) -> Any:
        """Send a message and return the reply with this key; raises WorkerGone."""
        answer = self._expected[key] = asyncio.get_running_loop().create_future()
        try:
            self.channel.send(message)
            return await answer
        except ChannelError as error:
            raise WorkerGone(str(error)) from error
        finally:
            self._expected.pop(key, None)

    def heard(self, message: FromWorker) -> None:
        """Process a message from the worker: its state, or an expected reply."""
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
        """Send a message; ignored if the process has exited."""
        with suppress(ChannelError):
            self.channel.send(message)

    # --- Shutdown ---

    def kill(self) -> None:
        """Send SIGKILL."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    async def ended(self) -> str:
        """Close the connections, wait for the process to exit, and return why it did."""
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
    # Not through uvloop, which would unblock every signal in the child process.
    return start_shielded(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=given,
        start_new_session=True,
    )
