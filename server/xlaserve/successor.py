"""The server that replaces this one on SIGUSR2: it gets ready first, then this one drains.

It is the same command, with the code and the files as they are by now.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

import structlog

from xlaserve import last_words
from xlaserve.predecessor import TAKEN_OVER, SharedSocket, handed
from xlaserve.settings import Settings
from xlaserve.systemd import Systemd
from xlaserve.transport.endpoints import Listener

_INIT = 1

_log = structlog.get_logger("successor")


class Successor:
    """Starts the replacement of this process, and hands over to it once it is ready."""

    def __init__(
        self,
        settings: Settings,
        listeners: Sequence[Listener],
        systemd: Systemd,
        is_ready: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._sockets = {
            one.setting: one.socket for one in listeners if isinstance(one.socket, SharedSocket)
        }
        self._systemd = systemd
        self._is_ready = is_ready
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._failing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the replacement, unless there is a reason not to; the log says which."""
        if reason := self._refusal():
            _log.warning("not replaced", reason=reason)
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        sockets = {setting: one.listening for setting, one in self._sockets.items()}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, *sys.orig_argv[1:]],
                    env=os.environ | self._systemd.environment() | handed(theirs, sockets),
                    pass_fds=[theirs.fileno(), *(one.fileno() for one in sockets.values())],
                )
        except OSError as error:
            ours.close()
            _log.error("not replaced", reason=str(error))
            return
        self._channel = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._heard)
        _log.info("replacement started", pid=self._process.pid)

    def _refusal(self) -> str:
        settings = self._settings
        if self._process is not None:
            return f"process {self._process.pid} is about to replace it"
        if os.getpid() == _INIT:
            return "with the first process of a container the container ends"
        if settings.modelmesh or settings.sagemaker_multi_model:
            return "who had models loaded would not know that they are gone"
        return "" if self._is_ready() else "the server is not ready"

    def _heard(self) -> None:
        assert self._channel is not None
        assert self._process is not None
        try:
            said = self._channel.recv(len(TAKEN_OVER))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        self._close_channel()
        if said != TAKEN_OVER:
            self._failing = asyncio.ensure_future(self._failed(self._process))
            return
        _log.info("replaced", by=self._process.pid)
        for one in self._sockets.values():
            one.shut()
        self._systemd.hand_over(self._process.pid)
        # From here on all is as after SIGTERM.
        os.kill(os.getpid(), signal.SIGTERM)

    async def _failed(self, process: "subprocess.Popen[bytes]") -> None:
        status = await asyncio.to_thread(process.wait)
        self._process = None
        how = last_words.how(status)
        reason = f"process {process.pid} ended with {how} before it was ready, its log says why"
        _log.error("not replaced", reason=reason)

    def _close_channel(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None

    def close(self) -> None:
        """End a replacement that is not ready: this server ends, and nobody wants another one."""
        if self._channel is not None and self._process is not None:
            self._process.terminate()
        self._close_channel()
