"""Shared by the sandboxed subprocesses: messages, resource limits, and forked workers.

Imports nothing from the server, so that those processes start quickly.
"""

import fcntl
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

SIZE = struct.Struct("!I")


def receive(stream: BinaryIO) -> Any:
    """Return the next message, or None at the end of the input."""
    data = _read(stream)
    return None if data is None else json.loads(data)


def send(stream: BinaryIO, message: Any) -> None:
    """Send a message."""
    _write(stream, _written(message))


def _written(message: Any) -> bytes:
    # A lone surrogate is valid in a Python string, but JSON readers would reject its escape.
    return json.dumps(message, ensure_ascii=False).encode(errors="replace")


def end_with(life: int) -> None:
    """Have the kernel kill this process and its forks when the other end of a pipe is closed.

    The server holds that end. A process that is busy or stopped would not notice the end of its
    input.
    """
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    # The process group, which contains only this process and its forks.
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    seen = select.poll()
    seen.register(life, 0)
    if seen.poll(0):  # the pipe was already closed
        os._exit(1)


def confine(memory_bytes: int) -> None:
    """Drop access to files, sockets and processes, and limit additional memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    for limit, value in (
        (resource.RLIMIT_AS, most),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(limit, (value, value))


_ATTEMPTS = 2
"""Attempts per message: if a fork is killed from outside, a new one gets the message once more."""
FROM_OUTSIDE = frozenset(
    {
        *(signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
        *(signal.SIGUSR1, signal.SIGUSR2),
    }
)
"""Signals sent by an operator or the OOM killer, never by a resource limit."""
_ENDING_SECONDS = 1.0
"""Time for a fork to exit after its pipes are closed, before it is killed."""
_ENDING_STEP_SECONDS = 0.001

Answer = Callable[[Any], Mapping[str, Any]]


def serve(begin: Callable[[Any], Answer]) -> None:
    """Call `begin` with the first message, then answer the others in a fork until the input ends.

    A fork that exceeds a limit dies, and the next message gets a new one, without repeating
    `begin`. An exception is answered as `failed`, a dead fork as `over`. If a fork is killed from
    outside, the message is retried once, and then answered as `killed`.
    """
    end_with(int(sys.argv[1]))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = receive(source)
    if first is None:
        return
    answer, fork = begin(first), None
    send(sink, {"text": ""})
    while (asked := _read(source)) is not None:
        how, found = None, None
        for _ in range(_ATTEMPTS):
            fork = fork or _Fork(answer, first["limits"])
            found = fork.ask(asked)
            if found is not None:
                break
            how, fork = fork.end(), None
            if how not in FROM_OUTSIDE:
                break
        if found is not None:
            _write(sink, found)
        elif how in FROM_OUTSIDE:
            send(sink, {"killed": f"its process was killed (signal {how})"})
        else:
            send(sink, {"over": "it exceeds its limits"})
        del asked, found


class _Fork:
    """A forked process that answers messages."""

    def __init__(self, answer: Answer, limits: Mapping[str, Any]) -> None:
        there, writes = os.pipe()
        reads, back = os.pipe()
        self._process = os.fork()
        if not self._process:
            # Close the parent's pipes, so that both sides notice when the other one exits.
            for one in (reads, writes, sys.stdin.fileno(), sys.stdout.fileno()):
                os.close(one)
            # Whatever happens, the fork must not continue with the parent's code.
            with suppress(BaseException):
                # Keep both pipes open until the exit: the parent takes a closed pipe for the end
                # of the fork.
                source, sink = os.fdopen(there, "rb"), os.fdopen(back, "wb")
                _answer(source, sink, answer, limits)
            os._exit(0)
        os.close(there)
        os.close(back)
        self._sink, self._source = os.fdopen(writes, "wb"), os.fdopen(reads, "rb")

    def ask(self, message: bytes) -> bytes | None:
        """Return the answer to a message, or None if the fork has died."""
        try:
            _write(self._sink, message)
        except OSError:
            return None
        return _read(self._source)

    def end(self) -> int:
        """End the fork and close its pipes; return the signal that had killed it, or 0."""
        status = self._ended()
        if status is None:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
            status = 0  # the signal was sent by this process
        self._source.close()
        with suppress(OSError):  # data that the fork has not read
            self._sink.close()
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0

    def _ended(self) -> int | None:
        """Return the fork's exit status, or None if it does not exit in time."""
        due = time.monotonic() + _ENDING_SECONDS
        while True:
            process, status = os.waitpid(self._process, os.WNOHANG)
            if process:
                return status
            if time.monotonic() > due:
                return None
            time.sleep(_ENDING_STEP_SECONDS)


def _answer(source: BinaryIO, sink: BinaryIO, answer: Answer, limits: Mapping[str, Any]) -> None:
    confine(limits["memory_bytes"])
    while (asked := _read(source)) is not None:
        # The default action of SIGPROF kills the process, even inside native code.
        signal.setitimer(signal.ITIMER_PROF, limits["cpu_seconds"])
        try:
            found = answer(json.loads(asked))
        except MemoryError:
            return  # memory may be in any state: exit
        except BaseException as error:
            # A Rust panic does not derive from Exception.
            found = {"failed": f"{type(error).__name__}: {str(error)[:1000]}"}
        data = _written(found)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if len(data) > limits["output_bytes"]:
            return
        _write(sink, data)
        del asked, found, data


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(SIZE.size)
    if len(head) < SIZE.size:
        return None
    size = SIZE.unpack(head)[0]
    data = stream.read(size)
    return data if len(data) == size else None


def _write(stream: BinaryIO, data: bytes) -> None:
    stream.write(SIZE.pack(len(data)) + data)
    stream.flush()
