"""Replaces this server by a new process on SIGUSR2, without downtime.

The new process runs the same command line, with the current code and files; this one drains when
the new one is ready.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import structlog

from xlaserve.concurrency.control_plane import ANSWERING, LEFT_BEHIND, ChangeKind, ChangeText
from xlaserve.process import last_words
from xlaserve.process.endpoints import Listener
from xlaserve.process.output import descriptors
from xlaserve.process.predecessor import CHANGES, TAKEN_OVER, WANTED, SharedSocket, handed
from xlaserve.process.systemd import Systemd
from xlaserve.residence import handover
from xlaserve.residence.lost import NobodyAnswers, known_versions
from xlaserve.settings import Settings

_INIT = 1

_log = structlog.get_logger("successor")


TO_DO: Mapping[str, str] = MappingProxyType(
    {
        "sequences": "clients must restart them with sequence_start",
        "cuda_shared_memory_regions": "clients must register them again",
        "cached_responses": "nothing; the response cache refills",
        "unsupported by the new version": "clients must load, configure and register again: the"
        " new server's version does not take over client changes",
    }
)
"""State that the new process does not inherit -> who has to restore it."""


class Changes(Protocol):
    """The changes that clients made in this server, such as loads."""

    async def hold(self, kinds: Collection[ChangeKind]) -> Sequence[ChangeText]:
        """Refuse further changes; return the earlier ones when none is in progress."""
        ...

    def go_on(self) -> None:
        """Accept changes again."""

    def files_of(self, change: ChangeText) -> Mapping[str, bytes]:
        """Read the files of a change from disk; blocks."""
        ...

    async def replies(self, question: str) -> Sequence[Any]:
        """Return each process's reply to a question."""
        ...


class Successor:
    """Starts a new process to replace this one, and hands over to it when it is ready."""

    def __init__(
        self,
        settings: Settings,
        listeners: Sequence[Listener],
        systemd: Systemd,
        changes: Changes,
        is_ready: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._sockets = {
            one.setting: one.socket for one in listeners if isinstance(one.socket, SharedSocket)
        }
        self._systemd = systemd
        self._changes = changes
        self._is_ready = is_ready
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self.has_taken_over = False
        """Whether the new process has taken over, so that this one shuts down."""
        self._channel: socket.socket | None = None
        self._is_given_changes = False
        self._working: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the new process, or log why that is not possible."""
        if reason := self._refusal():
            _log.warning("server not replaced", reason=reason)
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        sockets = {setting: one.listening for setting, one in self._sockets.items()}
        out, err = descriptors()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, *sys.orig_argv[1:]],
                    env=os.environ | self._systemd.environment() | handed(theirs, sockets),
                    pass_fds=[theirs.fileno(), *(one.fileno() for one in sockets.values())],
                    stdout=out,
                    stderr=err,
                )
        except OSError as error:
            ours.close()
            _log.error("server not replaced", reason=str(error))
            return
        self._channel = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._heard)
        _log.info("replacement started", pid=self._process.pid)

    def _refusal(self) -> str:
        settings = self._settings
        if self._process is not None:
            return f"process {self._process.pid} is already replacing it"
        if os.getpid() == _INIT:
            return "this is the container's first process, and the container would end with it"
        if settings.modelmesh or settings.sagemaker_multi_model:
            return "the platform that loaded the models would not learn that they are unloaded"
        return "" if self._is_ready() else "the server is not ready"

    def _heard(self) -> None:
        assert self._channel is not None
        assert self._process is not None
        try:
            message = self._channel.recv(len(TAKEN_OVER))
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if message == WANTED and not self._is_given_changes:
            self._is_given_changes = True
            self._work(self._hand_over(self._channel))
            return
        self._close_channel()
        if message != TAKEN_OVER:
            self._work(self._failed(self._process))
        else:
            self._work(self._replaced(self._process.pid))

    def _work(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task of the handover, and cancel the previous one."""
        if self._working is not None:
            self._working.cancel()
        self._working = asyncio.ensure_future(work)

    async def _hand_over(self, channel: socket.socket) -> None:
        """Send the clients' changes to the new process, and refuse further changes."""
        changes = await self._changes.hold(handover.kinds(self._settings))
        directory = self._settings.scratch_directory
        try:
            files_of = self._changes.files_of
            theirs = known_versions(await self._changes.replies(ANSWERING))
            file, left = await asyncio.to_thread(
                handover.write, directory, changes, files_of, theirs
            )
            with file:
                socket.send_fds(channel, [CHANGES], [file.fileno()])
        except (OSError, NobodyAnswers) as error:
            _log.error("changes of clients not handed over to the new process", reason=str(error))
            if self._channel is channel:
                # Without the changes the new process exits, and `_failed` handles that.
                channel.shutdown(socket.SHUT_RDWR)
            return
        for subject, reason in left.items():
            _log.error(
                "not handed over",
                what="client load",
                model=subject,
                reason=reason,
                to_do="the client must load it again, with its files",
            )
        _log.info("client changes handed over", changes=len(changes) - len(left))

    async def _replaced(self, process: int) -> None:
        _log.info("server replaced", by=process)
        for one in self._sockets.values():
            one.shut()
        self._systemd.hand_over(process)
        try:
            left = Counter[str]()
            for counts in await self._changes.replies(LEFT_BEHIND):
                left.update(counts)
            if not self._is_given_changes:
                left["unsupported by the new version"] = len(
                    await self._changes.hold(frozenset(ChangeKind))
                )
            for what, count in left.items():
                if count:
                    _log.warning("not handed over", what=what, count=count, to_do=TO_DO[what])
        finally:
            # Shut down as after SIGTERM; a second SIGTERM would abort requests in flight.
            if not self._is_closed:
                self.has_taken_over = True
                os.kill(os.getpid(), signal.SIGTERM)

    async def _failed(self, process: "subprocess.Popen[bytes]") -> None:
        status = await asyncio.to_thread(process.wait)
        if self._is_closed:
            return  # this process is shutting down, and has stopped the new one
        self._process = None
        self._is_given_changes = False
        self._changes.go_on()
        how = last_words.how(status)
        reason = f"process {process.pid} ended with {how} before it was ready; see its log"
        _log.error("server not replaced", reason=reason)

    def _close_channel(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None

    def close(self) -> None:
        """Terminate a new process that is not ready yet: this server shuts down."""
        self._is_closed = True
        if self._channel is not None and self._process is not None:
            self._process.terminate()
        self._close_channel()
