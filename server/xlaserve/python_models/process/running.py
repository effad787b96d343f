"""Starts, monitors and ends the process of one replica of a model."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from xlaserve.process.children import start_shielded
from xlaserve.process.endings import end_session
from xlaserve.process.silence import Stopped
from xlaserve.python_models.process.pipe import Pipe
from xlaserve.python_models.process.printing import ProcessLog, log_printed
from xlaserve.python_models.process.slab import SlabReader, SlabWriter, make_slab

COMMAND = (sys.executable, "-P", "-m", "xlaserve.python_models.process.child")
_END_SECONDS = 5.0
"""Seconds that a process may take to exit after the pipe is closed."""
_POLL_SECONDS = 0.005
_PAGE = os.sysconf("SC_PAGE_SIZE")


class RunningProcess:
    """A child process, and the server's end of the pipe to it.

    The process leads its own session. Its descendants are killed with it, except those that start a
    session of their own.
    """

    def __init__(self, log: ProcessLog, poll_seconds: float, shared_bytes: int) -> None:
        """Start the process; raises OSError. `poll_seconds` is the timeout for receiving messages.

        `shared_bytes` of memory are shared with the server, half of it for each direction.
        """
        with ExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.callback(theirs.close)
            failed = stack.enter_context(ExitStack())
            failed.callback(ours.close)
            ours.settimeout(poll_seconds)
            slabs = [_slab(stack, shared_bytes // 2 // _PAGE * _PAGE) for _ in range(2)]
            writer = SlabWriter(slabs[0]) if slabs[0] >= 0 else None
            reader = SlabReader(slabs[1], writable=False) if slabs[1] >= 0 else None
            given = (theirs.fileno(), *slabs)
            self._process: subprocess.Popen[bytes] = start_shielded(
                [*COMMAND, str(os.getpid()), *map(str, given)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[descriptor for descriptor in given if descriptor >= 0],
                start_new_session=True,
            )
            failed.pop_all()
        self.stopped = Stopped(self._process.pid)
        """How long the process has been stopped (SIGSTOP)."""
        self._ending = threading.Lock()
        """Held while the process is killed or reaped, so that no other process has its id."""
        self.pipe = Pipe(ours, writer, reader)
        printing = threading.Thread(target=log_printed, args=(self._process, log), daemon=True)
        printing.start()

    @property
    def has_ended(self) -> bool:
        """Tell whether the process has ended, even if a forked child keeps the pipe open.

        The process remains a zombie until `end`, so that its process id, which identifies its
        session, is not reused.
        """
        if self._process.returncode is not None:
            return True
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self._process.pid, flags) is not None
        except ChildProcessError:
            # Another thread reaped it in `end` after the check above.
            return True

    @property
    def resident_bytes(self) -> int:
        """Return the resident memory of the process, or 0 if unknown."""
        with suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{self._process.pid}/statm").read_text()
            return int(text.split()[1]) * _PAGE
        return 0

    def wait(self, seconds: float) -> bool:
        """Wait for the process to end; return False if `seconds` pass first."""
        until = time.monotonic() + seconds
        while not self.has_ended and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return self.has_ended

    def kill(self) -> None:
        """Kill the process and its process group."""
        with self._ending:
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self, reason: str) -> str:
        """Close the pipe, end the process, and return the reason, by default its exit status."""
        self.pipe.close()
        if not reason:
            self.wait(_END_SECONDS)
        self.kill()
        # Until the process is reaped, its process id and session id are not reused.
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
