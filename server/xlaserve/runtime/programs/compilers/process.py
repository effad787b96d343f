"""A compiler process seen from its client: a line of JSON each way.

Bytes that the line announces follow it. Used for the loads of a server (`pool.py`), and for devices
that are not there (`targets/compiling.py`).
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
from xlaserve.process.children import start_deaf
from xlaserve.process.silence import Stopped

_SHOWN_CHARACTERS = 300
_PAGE_BYTES = 4096

_LOOK_SECONDS = 0.1
"""Interval of checks of a process's memory."""

DOING = "doing: "
"""Prefix of the lines on stderr that name a process's next phase."""
_RESIDENT = 1
"""Position of the resident pages in /proc/PID/statm."""


class ProcessEndedError(Exception):
    """The process wrote no whole answer; its text says why."""

    def __init__(
        self,
        reason: str,
        *,
        is_late: bool = False,
        is_limit: bool = False,
        is_foreign: bool = False,
        doing: str = "",
        said: str = "",
    ) -> None:
        super().__init__(reason)
        self.is_foreign = is_foreign
        """Whether somebody has stopped or killed it: another one may succeed."""
        self.said = said
        """Its output on stderr."""
        self.is_late = is_late
        """Whether it was killed since its time was over."""
        self.is_limit = is_limit
        """Whether its time was over, be it that of the processor."""
        self.doing = doing
        """The last phase that it named, or empty."""


class CompilerProcess:
    """One process, from its start to its end. One thread asks it, any may kill it."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start it; raises OSError where the system refuses."""
        self.variables = variables
        self._killed_for: ProcessEndedError | None = None
        """The reason for which the watcher killed it."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, it is closed with the process
        try:
            self._process: subprocess.Popen[bytes] = start_deaf(
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

        Raises ProcessEndedError, also where no answer came in this many seconds, or more than
        `most_bytes` were resident: it is killed then.
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
        """Read an unsolicited line; raises ProcessEndedError."""
        assert self._process.stdout is not None
        with self._watched():
            line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._ended()
        return line

    @contextmanager
    def _watched(self, seconds: float = math.inf, most_bytes: int = 0) -> Iterator[None]:
        """Have the process killed where it takes longer within a block, more, or is stopped."""
        done, until = threading.Event(), time.monotonic() + seconds
        stopped = Stopped(self.pid)

        def watch() -> None:
            while not done.wait(min(_LOOK_SECONDS, max(0.0, until - time.monotonic()))):
                stopped.look()
                # Set first: the reader sees the end of the process before `kill` returns.
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
        """Truncate its error output, so that a long-lived process does not fill the disk."""
        # Its descriptor is the same open file: it goes on where this one is.
        self._errors.seek(0)
        self._errors.truncate()

    @property
    def resident_bytes(self) -> int:
        """Return its resident memory; 0 if unknown."""
        try:
            pages = Path(f"/proc/{self.pid}/statm").read_text().split()[_RESIDENT]
        except (OSError, IndexError):
            return 0
        return int(pages) * _PAGE_BYTES

    def kill(self) -> None:
        """End it at once, whatever it compiles."""
        self._process.kill()

    def stop(self) -> None:
        """End it, and wait for its end."""
        self._process.kill()
        # Its pipes are closed, one of which may hold what it never read.
        with suppress(BrokenPipeError), self._process:
            pass
        self._errors.close()

    def _ended(self) -> ProcessEndedError:
        """Return why the process stopped writing."""
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        phrases = [line.removeprefix(DOING) for line in said if line.startswith(DOING)]
        doing = phrases[-1][:_SHOWN_CHARACTERS] if phrases else ""
        if self._killed_for is not None:
            self._killed_for.doing, self._killed_for.said = doing, "\n".join(said)
            return self._killed_for
        how = last_words.how(status)
        others = [line for line in said if not line.startswith(DOING)]
        last = f": {others[-1][:_SHOWN_CHARACTERS]}" if others else ""
        return ProcessEndedError(
            f"its compilation ended the compiler process ({how}){last}",
            is_limit=status == -Signals.SIGXCPU,
            is_foreign=-status in FROM_OUTSIDE,
            doing=doing,
            said="\n".join(said),
        )
