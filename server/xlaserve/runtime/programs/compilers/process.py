"""The client side of a compiler process: JSON lines in both directions.

Binary data that a line announces follows it. Used for a server's loads (`pool.py`), and to compile
for devices that the host lacks (`targets/compiling.py`).
"""

import math
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import Signals

from xlaserve.language.confining import FROM_OUTSIDE
from xlaserve.process import last_words
from xlaserve.process.children import start_shielded
from xlaserve.process.silence import Stopped

_SHOWN_CHARACTERS = 300
_PAGE_BYTES = 4096

_POLL_SECONDS = 0.1
"""Interval in seconds at which a process's memory is checked."""

DOING = "doing: "
"""Prefix of stderr lines in which the process names its next phase."""
_RESIDENT = 1
"""Index of the resident pages in /proc/PID/statm."""


class ProcessEndedError(Exception):
    """The process ended without a complete answer; the message says why."""

    def __init__(
        self,
        reason: str,
        *,
        is_late: bool = False,
        is_limit: bool = False,
        is_foreign: bool = False,
        doing: str = "",
        output: str = "",
    ) -> None:
        super().__init__(reason)
        self.is_foreign = is_foreign
        """Whether someone else stopped or killed the process: another attempt may succeed."""
        self.output = output
        """The process's output on stderr."""
        self.is_late = is_late
        """Whether the process was killed because its elapsed time was over."""
        self.is_limit = is_limit
        """Whether the process exceeded its elapsed time or its processor time."""
        self.doing = doing
        """The last phase that the process named, or an empty string."""


class CompilerProcess:
    """A running compiler process. One thread sends requests; any thread may kill it."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start the process; raises OSError if the system refuses."""
        self.variables = variables
        self._killed_for: ProcessEndedError | None = None
        """Why the watcher killed the process; None if it did not."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, it is closed with the process
        try:
            self._process: subprocess.Popen[bytes] = start_shielded(
                command,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except OSError:
            self._errors.close()
            raise

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def ask(
        self,
        line: bytes,
        attached: Sequence[bytes | memoryview],
        seconds: float,
        *,
        most_bytes: int = 0,
    ) -> bytes:
        """Send a line and its attachment, and return the answer's line.

        Kills the process if it does not answer within this many seconds or exceeds `most_bytes` of
        resident memory. Raises ProcessEndedError.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._watched(seconds, most_bytes):
            try:
                stdin.write(line + b"\n")
                for part in attached:
                    stdin.write(part)
                stdin.flush()
                answer = stdout.readline()
            except BrokenPipeError:
                answer = b""
        if not answer.endswith(b"\n"):
            raise self._ended()
        return answer

    def read(self, count: int) -> bytes:
        """Read an answer's attachment; raises ProcessEndedError if it is incomplete."""
        assert self._process.stdout is not None
        with self._watched():
            data = self._process.stdout.read(count)
        if len(data) < count:
            raise self._ended()
        return data

    def line(self) -> bytes:
        """Read a line that the process sends by itself; raises ProcessEndedError."""
        assert self._process.stdout is not None
        with self._watched():
            line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._ended()
        return line

    @contextmanager
    def _watched(self, seconds: float = math.inf, most_bytes: int = 0) -> Iterator[None]:
        """Watch the process within a block; kill it if it exceeds a limit or is stopped."""
        done, until = threading.Event(), time.monotonic() + seconds
        stopped = Stopped(self.pid)

        def watch() -> None:
            while not done.wait(min(_POLL_SECONDS, max(0.0, until - time.monotonic()))):
                stopped.look()
                # Set this before the kill: the reader sees end-of-file before `kill` returns.
                self._killed_for = self._excess(most_bytes, seconds, until, stopped)
                if self._killed_for is not None:
                    self._process.kill()
                    return

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _excess(
        self, most_bytes: int, seconds: float, until: float, stopped: Stopped
    ) -> ProcessEndedError | None:
        if 0 < most_bytes < self.resident_bytes:
            return ProcessEndedError(f"its compilation took more than {most_bytes} bytes")
        if time.monotonic() >= until:
            text = f"its compilation did not end in {seconds:g} seconds"
            return ProcessEndedError(text, is_late=True, is_limit=True)
        if stopped.is_over:
            text = f"it was stopped for {stopped.seconds:.0f} seconds (SIGSTOP)"
            return ProcessEndedError(text, is_foreign=True)
        return None

    def forget_errors(self) -> None:
        """Truncate the process's stderr file, so that it does not fill the disk."""
        # The process shares this file descriptor's offset, so it continues to write at the start.
        self._errors.seek(0)
        self._errors.truncate()

    @property
    def resident_bytes(self) -> int:
        """Return the process's resident memory in bytes, or 0 if unknown."""
        try:
            pages = Path(f"/proc/{self.pid}/statm").read_text().split()[_RESIDENT]
        except (OSError, IndexError):
            return 0
        return int(pages) * _PAGE_BYTES

    def kill(self) -> None:
        """Kill the process immediately."""
        self._process.kill()

    def stop(self) -> None:
        """Kill the process, and wait until it has ended."""
        self._process.kill()
        # Closing the pipes raises BrokenPipeError if they contain unread data.
        with suppress(BrokenPipeError), self._process:
            pass
        self._errors.close()

    def _ended(self) -> ProcessEndedError:
        """Return the error that says why the process stopped writing."""
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        phrases = [line.removeprefix(DOING) for line in lines if line.startswith(DOING)]
        doing = phrases[-1][:_SHOWN_CHARACTERS] if phrases else ""
        if self._killed_for is not None:
            self._killed_for.doing, self._killed_for.output = doing, "\n".join(lines)
            return self._killed_for
        how = last_words.how(status)
        others = [line for line in lines if not line.startswith(DOING)]
        last = f": {others[-1][:_SHOWN_CHARACTERS]}" if others else ""
        return ProcessEndedError(
            f"its compilation ended the compiler process ({how}){last}",
            is_limit=status == -Signals.SIGXCPU,
            is_foreign=-status in FROM_OUTSIDE,
            doing=doing,
            output="\n".join(lines),
        )
