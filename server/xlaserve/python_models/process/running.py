"""The process of one copy of a model: its start, its memory, and its end."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from xlaserve.process.children import start_deaf
from xlaserve.process.endings import end_session
from xlaserve.process.silence import Stopped
from xlaserve.python_models.process.pipe import Pipe
from xlaserve.python_models.process.printing import ProcessLog, log_printed
from xlaserve.python_models.process.slab import SlabReader, SlabWriter, make_slab

COMMAND = (sys.executable, "-P", "-m", "xlaserve.python_models.process.child")
_END_SECONDS = 5.0
"""Seconds for a process to end by itself after closing the pipe."""
_POLL_SECONDS = 0.005
_PAGE = os.sysconf("SC_PAGE_SIZE")


class RunningProcess:
    """A process that was started, and the server's end of the pipe to it.

    It leads a session of its own: what it starts ends with it, unless that leads one too.
    """

    def __init__(self, log: ProcessLog, look_seconds: float, shared_bytes: int) -> None:
        """Start it; raises OSError. Its messages are looked for `look_seconds` at a time.

        With `shared_bytes` it shares so much memory with the server, half for either direction.
        """
        with ExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.callback(theirs.close)
            failed = stack.enter_context(ExitStack())
            failed.callback(ours.close)
            ours.settimeout(look_seconds)
            slabs = [_slab(stack, shared_bytes // 2 // _PAGE * _PAGE) for _ in range(2)]
            writer = SlabWriter(slabs[0]) if slabs[0] >= 0 else None
            reader = SlabReader(slabs[1], writable=False) if slabs[1] >= 0 else None
            given = (theirs.fileno(), *slabs)
            self._process: subprocess.Popen[bytes] = start_deaf(
                [*COMMAND, str(os.getpid()), *map(str, given)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[descriptor for descriptor in given if descriptor >= 0],
                start_new_session=True,
            )
            failed.pop_all()
        self.stopped = Stopped(self._process.pid)
        """How long it has been stopped (SIGSTOP)."""
        self._ending = threading.Lock()
        """Held while it is killed, and while its number is given back."""
        self.pipe = Pipe(ours, writer, reader)
        printing = threading.Thread(target=log_printed, args=(self._process, log), daemon=True)
        printing.start()

    @property
    def has_ended(self) -> bool:
        """Tell whether it is gone, though its end of the pipe may be held by what it forked.

        It is left a zombie until `end`: so no other process is given its number, by which all that
        it has started is ended.
        """
        if self._process.returncode is not None:
            return True
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self._process.pid, flags) is not None
        except ChildProcessError:
            # Another thread came to `end` between the two looks.
            return True

    @property
    def resident_bytes(self) -> int:
        """Return its memory; 0 if unknown."""
        with suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{self._process.pid}/statm").read_text()
            return int(text.split()[1]) * _PAGE
        return 0

    def wait(self, seconds: float) -> bool:
        """Wait for its end, and tell whether it came in time."""
        until = time.monotonic() + seconds
        while not self.has_ended and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return self.has_ended

    def kill(self) -> None:
        """End it now, with all of its session."""
        with self._ending:
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self, reason: str) -> str:
        """Close the pipe, end it, and say why it ended: the reason, or what the kernel says."""
        self.pipe.close()
        if not reason:
            self.wait(_END_SECONDS)
        self.kill()
        # Its number is its own until it is waited for, and so is that of its session.
        end_session(self._process.pid)
        with self._ending:
            self._process.wait()
        return reason or _status(self._process.returncode)


def _slab(stack: ExitStack, size: int) -> int:
    descriptor = make_slab(size)
    if descriptor >= 0:
        stack.callback(os.close, descriptor)
    return descriptor


def _status(status: int) -> str:
    if status < 0:
        return f"it ended by signal {signal.Signals(-status).name}"
    return f"it ended with exit status {status}"
