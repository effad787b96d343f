"""Subprocesses for untrusted templates and grammars, killed when they exceed a limit."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import msgspec

from xlaserve.language.confining import FROM_OUTSIDE
from xlaserve.process import last_words
from xlaserve.process.children import start_shielded
from xlaserve.process.silence import Stopped, is_stopped

_SIZE_BYTES = 4
_END_SECONDS = 5.0
"""Time for a process to exit after it has closed its pipe."""
_LOOK_SECONDS = 0.25
"""Polling interval of the check that a busy process is not stopped."""
_ATTEMPTS = 2
"""Attempts per query: a process may be stopped or killed from outside."""
_SAID_BYTES = 1 << 16
_SHOWN_CHARACTERS = 300
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one query."""

    cpu_seconds: float = 2.0
    memory_bytes: int = 512 << 20
    """Memory limit, in addition to the memory used before untrusted input is read."""
    output_bytes: int = 32 << 20
    seconds: float = 30.0
    """Wall-clock limit: longer than the CPU limit, since the CPU is shared."""

    def __str__(self) -> str:
        """Return the limits in the words of error texts."""
        return f"{self.cpu_seconds:g} CPU seconds and {self.memory_bytes} bytes of memory"


class TookTooMuch(Exception):
    """A query exceeded a limit, and its process has ended."""


class _FromOutside(Exception):
    """A process was stopped or killed from outside; another attempt may succeed."""


class LimitedProcess:
    """One process, killed at the latest when its last reference is dropped."""

    def __init__(self, program: Sequence[str], limits: Limits, called: str, model: str) -> None:
        """Start the process; raises OSError. `program` are the arguments of Python that name it."""
        self._limits = limits
        self._called, self._model = called, model
        # Nothing is ever written to this pipe: it closes when this process ends, however it ends.
        life, held = os.pipe()
        try:
            self._process = _started(program, life)
        except OSError:
            os.close(held)
            raise
        finally:
            os.close(life)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self.end = weakref.finalize(self, _end, self._process, held)
        """Kills the process; idempotent."""

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Tell whether the process, or one that it forked, is stopped (SIGSTOP)."""
        return is_stopped(self.pid, with_forks=True)

    def kill(self) -> None:
        """Kill the process; pending queries fail. May be called in any thread."""
        self._process.kill()

    def ask(self, message: bytes) -> Mapping[str, Any]:
        """Send a message, and return the answer. Raises OSError, TookTooMuch and _FromOutside."""
        until = time.monotonic() + self._limits.seconds
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        rest = memoryview(len(message).to_bytes(_SIZE_BYTES, "big") + message)
        while rest:
            self._wait(until, stdin.fileno(), select.POLLOUT)
            try:
                rest = rest[os.write(stdin.fileno(), rest) :]
            except BrokenPipeError:
                raise self._ended() from None
        size = int.from_bytes(self._read(stdout.fileno(), _SIZE_BYTES, until), "big")
        # In JSON, escaping may expand a byte to six and a character to twelve.
        if size > 8 * self._limits.output_bytes:
            raise TookTooMuch(f"it writes more than {self._limits.output_bytes} bytes")
        found: dict[str, Any] = msgspec.json.decode(self._read(stdout.fileno(), size, until))
        return found

    def _read(self, file: int, count: int, until: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._wait(until, file, select.POLLIN)
            more = os.read(file, min(count - len(data), 1 << 20))
            if not more:
                raise self._ended()
            data += more
        return bytes(data)

    def _ended(self) -> "TookTooMuch | _FromOutside":
        """Log the last output of the dead process, and return the error to raise."""
        is_foreign = True
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            is_foreign = False
            self._process.kill()
            status = self._process.wait()
        errors = self._process.stderr
        assert errors is not None
        os.set_blocking(errors.fileno(), False)
        said = errors.read(_SAID_BYTES) or b""
        how, last = last_words.how(status), last_words.last_line(said)
        last_words.tell(self._called, how, said, self._model)
        if status > 0:
            behind = f": {last[:_SHOWN_CHARACTERS]}" if last else ""
            return TookTooMuch(f"its process ended with {how}{behind}")
        if is_foreign and -status in FROM_OUTSIDE:
            return _FromOutside(f"it was killed ({how})")
        return TookTooMuch(f"its process ended ({how}), its limits are {self._limits}")

    def _wait(self, until: float, file: int, event: int) -> None:
        poll = select.poll()
        poll.register(file, event)
        stopped = Stopped(self.pid, with_forks=True)
        while (left := until - time.monotonic()) > 0:
            if poll.poll(min(left, _LOOK_SECONDS) * 1000):
                return
            stopped.look()
            if stopped.is_over:
                raise _FromOutside("its process is stopped (SIGSTOP)")
        raise TookTooMuch(f"it took longer than {self._limits.seconds:g} seconds")


class Limited:
    """Queries a process, started on first use and restarted after one that exceeded a limit.

    Its methods may be called in any thread.
    """

    def __init__(
        self,
        program: Sequence[str],
        limits: Limits,
        first: Mapping[str, Any],
        *,
        called: str,
        model: str,
    ) -> None:
        """`first` is the trusted first message, sent with the limits before untrusted input.

        The log names the process by `called` and its model.
        """
        self.limits = limits
        self._named = called, model
        self._program = program
        self._first = first
        self._asking = threading.Lock()
        """Held during a query: the process answers one at a time."""
        self._process: LimitedProcess | None = None
        self._is_closed = False

    def ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to a message. Blocks.

        Raises TookTooMuch, OSError if the process was lost, and the encoder's error for a message
        that is not JSON. An answer with `lost` ends the process; with `over` it continues.
        """
        asked = _ENCODER.encode(message)
        with self._asking:
            for attempt in range(_ATTEMPTS):
                try:
                    return self._asked(asked)
                except _FromOutside as error:
                    if attempt + 1 == _ATTEMPTS:
                        raise OSError(str(error)) from None
        raise AssertionError("expected at least one attempt")

    def _asked(self, asked: bytes) -> Mapping[str, Any]:
        has_failed = True
        try:
            process = self._begun()
            found = process.ask(asked) if isinstance(process, LimitedProcess) else process
            # A process that ran out of memory may be in any state.
            has_failed = "lost" in found or process is found
            if "killed" in found:
                _raise_killed(found["killed"])
        except msgspec.DecodeError as error:
            raise OSError(str(error)) from None
        finally:
            if has_failed:
                self._end()
        return found

    def begin(self) -> None:
        """Start the process ahead of the first query, which reports any error of the start."""
        with self._asking, suppress(OSError, TookTooMuch, _FromOutside, msgspec.DecodeError):
            self._begun()

    def close(self) -> None:
        """End the process for good, even during a query: its caller has ended."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._asking:
            self._end()

    def _begun(self) -> LimitedProcess | Mapping[str, Any]:
        """Return the process, or its answer if it failed to start."""
        process = self._process
        if process is not None and process.is_stopped:
            self._end()
            process = None
        if process is not None:
            return process
        self._check_open()
        process = self._process = LimitedProcess(self._program, self.limits, *self._named)
        # Check again: `close` kills only the process that exists at that moment.
        self._check_open()
        found = process.ask(_ENCODER.encode({**self._first, "limits": asdict(self.limits)}))
        return process if "text" in found else found

    def _check_open(self) -> None:
        if self._is_closed:
            raise OSError("it is being unloaded")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()


def _raise_killed(said: str) -> NoReturn:
    raise OSError(said)


def _started(program: Sequence[str], life: int) -> "subprocess.Popen[bytes]":
    # Not the server's environment: it may hold secrets.
    return start_shielded(
        [sys.executable, "-s", "-P", "-X", "utf8", *program, str(life)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A pipe: the process may write no files, and is killed when it fills this one.
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd="/",
        bufsize=0,
        pass_fds=[life],
        start_new_session=True,
    )


def _end(process: "subprocess.Popen[bytes]", held: int) -> None:
    # Kill the whole process group, since the process leads a session.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    os.close(held)
    for stream in (process.stdin, process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    process.wait()
