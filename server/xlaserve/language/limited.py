"""Processes in which texts of others are computed, ended where one takes too much."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from xlaserve.language.confining import FROM_OUTSIDE
from xlaserve.process import last_words
from xlaserve.process.children import start_deaf
from xlaserve.process.silence import Stopped, is_stopped

_SIZE_BYTES = 4
_END_SECONDS = 5.0
"""Seconds that a process may take to end once it has closed its pipe."""
_LOOK_SECONDS = 0.25
"""Between two looks whether a process that is asked can answer."""
_ATTEMPTS = 2
"""Processes for one question: the first may be stopped or killed by no fault of what is asked."""
_SAID_BYTES = 1 << 16
_SHOWN_CHARACTERS = 300
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one answer may take."""

    cpu_seconds: float = 2.0
    memory_bytes: int = 512 << 20
    """Beyond what the process has before it reads what others wrote."""
    output_bytes: int = 32 << 20
    seconds: float = 30.0
    """On the clock: more than of the processor, which it shares."""

    def __str__(self) -> str:
        """Return what it allows, as errors say it."""
        return (
            f"{self.cpu_seconds:g} seconds of the processor and {self.memory_bytes} bytes of memory"
        )


class TookTooMuch(Exception):
    """A query exceeded a limit, and its process has ended."""


class _FromOutside(Exception):
    """Somebody has stopped or killed a process, which has ended; another one can do the same."""


class LimitedProcess:
    """One process, which ends at the latest when its last reference goes."""

    def __init__(self, script: Path, limits: Limits, called: str, model: str) -> None:
        """Start it; raises OSError."""
        self._limits = limits
        self._called, self._model = called, model
        # Nothing is ever written to it: it closes with this process, whatever ends that.
        life, held = os.pipe()
        try:
            self._process = _started(script, life)
        except OSError:
            os.close(held)
            raise
        finally:
            os.close(life)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self.end = weakref.finalize(self, _end, self._process, held)
        """Kills it, once; it holds nothing that could be lost."""

    @property
    def pid(self) -> int:
        """Return its id."""
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Tell whether somebody has stopped it, or what it has forked."""
        return is_stopped(self.pid, with_forks=True)

    def kill(self) -> None:
        """Have it end, and whoever waits for an answer told so. May be called in any thread."""
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
        # JSON may write a byte as six, and a character as twelve.
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
        """Return why it wrote no more, once the log has what it said last."""
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
        return TookTooMuch(f"its process ended ({how}): it may take {self._limits}")

    def _wait(self, until: float, file: int, event: int) -> None:
        poll = select.poll()
        poll.register(file, event)
        stopped = Stopped(self.pid, with_forks=True)
        while (left := until - time.monotonic()) > 0:
            if poll.poll(min(left, _LOOK_SECONDS) * 1000):
                return
            stopped.look()
            if stopped.is_over:
                raise _FromOutside("it is stopped (SIGSTOP)")
        raise TookTooMuch(f"it took longer than {self._limits.seconds:g} seconds")


class Limited:
    """Asks a process that begins with the first question, and anew behind what took too much.

    Its methods may be called in any thread.
    """

    def __init__(
        self, script: Path, limits: Limits, first: Mapping[str, Any], *, called: str, model: str
    ) -> None:
        """`first` is what it is told before what others wrote, beside its limits.

        The log names it by what it is `called`, and its model.
        """
        self.limits = limits
        self._named = called, model
        self._script = script
        self._first = first
        self._asking = threading.Lock()
        """Held while the process is asked: it answers one after the other."""
        self._process: LimitedProcess | None = None
        self._is_closed = False

    def ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to a message. Blocks.

        Raises TookTooMuch, OSError where the process was lost, and what a message raises that is no
        JSON. What says `lost` ends the process: one that forks says `over`, and goes on.
        """
        asked = _ENCODER.encode(message)
        with self._asking:
            for attempt in range(_ATTEMPTS):
                try:
                    return self._asked(asked)
                except _FromOutside as error:
                    if attempt + 1 == _ATTEMPTS:
                        raise OSError(str(error)) from None
        raise AssertionError("there is one attempt at least")

    def _asked(self, asked: bytes) -> Mapping[str, Any]:
        has_failed = True
        try:
            process = self._begun()
            found = process.ask(asked) if isinstance(process, LimitedProcess) else process
            # What has run out of memory may have left anything behind.
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
        """Start the process before it is asked; what goes wrong, the first question says."""
        with self._asking, suppress(OSError, TookTooMuch, _FromOutside, msgspec.DecodeError):
            self._begun()

    def close(self) -> None:
        """End the process for good, whatever it computes: who asked for that has ended."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._asking:
            self._end()

    def _begun(self) -> LimitedProcess | Mapping[str, Any]:
        """Return the process, or its answer where it says that it cannot begin."""
        process = self._process
        if process is not None and process.is_stopped:
            self._end()
            process = None
        if process is not None:
            return process
        self._check_open()
        process = self._process = LimitedProcess(self._script, self.limits, *self._named)
        # Again: `close` kills the process that it sees, and the next one sees that it is closed.
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


def _started(script: Path, life: int) -> "subprocess.Popen[bytes]":
    # Nothing of the server's environment: its secrets are no business of what runs there.
    return start_deaf(
        [sys.executable, "-s", "-P", "-X", "utf8", str(script), str(life)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A pipe: a process without files may write no other, and one that fills it is ended.
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd="/",
        bufsize=0,
        pass_fds=[life],
        start_new_session=True,
    )


def _end(process: "subprocess.Popen[bytes]", held: int) -> None:
    # With those that it has started: it leads a session.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    os.close(held)
    for stream in (process.stdin, process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    process.wait()
