"""Shared parts of the processes that compute foreign texts: messages, limits, forks.

It needs nothing of the server: those scripts read it from their own directory.
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
    """Return the next message, None at the end."""
    data = _read(stream)
    return None if data is None else json.loads(data)


def send(stream: BinaryIO, message: Any) -> None:
    """Write a message."""
    _write(stream, _written(message))


def _written(message: Any) -> bytes:
    # Half of a surrogate pair is text for Python alone: as an escape no reader would take it.
    return json.dumps(message, ensure_ascii=False).encode(errors="replace")


def end_with(life: int) -> None:
    """Have the system kill this process and its forks once the other end of a pipe is closed.

    The server holds that; a process that computes, or is stopped, reads no end of its input.
    """
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    # Its group, which nobody else is of: it leads a session.
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    seen = select.poll()
    seen.register(life, 0)
    if seen.poll(0):  # it was closed before
        os._exit(1)


def confine(memory_bytes: int) -> None:
    """Take away files, sockets, processes, and memory beyond so much more."""
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
"""Forks for one message: the first may be killed, which is no fault of the message."""
FROM_OUTSIDE = frozenset(
    {
        *(signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
        *(signal.SIGUSR1, signal.SIGUSR2),
    }
)
"""Signals that come from outside, such as an operator or the OOM killer, never from a limit."""
_ENDING_SECONDS = 1.0
"""Seconds that a fork whose pipes are closed has to end by itself, before it is killed."""
_ENDING_STEP_SECONDS = 0.001

Answer = Callable[[Any], Mapping[str, Any]]


def serve(begin: Callable[[Any], Answer]) -> None:
    """Begin with the first message, then have a fork answer the others, until the input ends.

    A fork ends where it takes too much, and the next message has another: no work is lost with it.
    Exceptions are answered as `failed`, and a fork that has ended as `over`. One that was killed
    from outside tells nothing of a message: another one has it, and then it is `killed`.
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
            send(sink, {"killed": f"what computes it was killed (signal {how})"})
        else:
            send(sink, {"over": "it takes more than it may"})
        del asked, found


class _Fork:
    """A process that answers, from where it was forked."""

    def __init__(self, answer: Answer, limits: Mapping[str, Any]) -> None:
        there, writes = os.pipe()
        reads, back = os.pipe()
        self._process = os.fork()
        if not self._process:
            # The pipes to the server are the other one's, whose end is seen by theirs.
            for one in (reads, writes, sys.stdin.fileno(), sys.stdout.fileno()):
                os.close(one)
            # Whatever becomes of it, it must not go on as the process that was forked.
            with suppress(BaseException):
                # Named here, so that both stay open until it exits: their end is taken for its end.
                source, sink = os.fdopen(there, "rb"), os.fdopen(back, "wb")
                _answer(source, sink, answer, limits)
            os._exit(0)
        os.close(there)
        os.close(back)
        self._sink, self._source = os.fdopen(writes, "wb"), os.fdopen(reads, "rb")

    def ask(self, message: bytes) -> bytes | None:
        """Return the answer to a message, None where it has ended instead."""
        try:
            _write(self._sink, message)
        except OSError:
            return None
        return _read(self._source)

    def end(self) -> int:
        """End it, and close its pipes; return the signal that had ended it, 0 for none."""
        status = self._ended()
        if status is None:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
            status = 0  # the signal was this process's own
        self._source.close()
        with suppress(OSError):  # what it did not read
            self._sink.close()
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0

    def _ended(self) -> int | None:
        """Return the status that it ended with; None where it goes on without its pipes."""
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
        # What it does by default is to end the process, whatever that is busy with.
        signal.setitimer(signal.ITIMER_PROF, limits["cpu_seconds"])
        try:
            found = answer(json.loads(asked))
        except MemoryError:
            return  # it may have left anything behind
        except BaseException as error:
            # What panics in Rust is no Exception.
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
