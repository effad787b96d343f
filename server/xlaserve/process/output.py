"""Logs everything that this process and its children print, one record per line."""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import structlog

from xlaserve.process import last_words, log
from xlaserve.process.best_effort import best_effort, finish
from xlaserve.process.children import start_shielded
from xlaserve.process.log_everything import PrintedLines, take_hooks

_READER = (sys.executable, "-P", "-m", "xlaserve.process.output_reader")
_STREAMS = {"stdout": 1, "stderr": 2}
_LEVELS = {"stdout": "info", "stderr": "warning"}
_MOST_WAIT = struct.pack("ll", 1, 0)
"""Send timeout of one second, so that a reader that stops cannot block a write for longer."""
_AGAIN_SECONDS = 1.0

_log = structlog.get_logger("output")


def descriptors() -> tuple[int, int]:
    """Return descriptors of the server's original stdout and stderr, for its other processes."""
    first, second = (getattr(getattr(sys, name), "behind", None) for name in _STREAMS)
    return (1 if first is None else first.fileno(), 2 if second is None else second.fileno())


@contextmanager
def logged_output(
    level: str, *, worker: int | None = None, given: Sequence[int] = ()
) -> Iterator[None]:
    """Configure the log; within this context, log everything that is printed.

    A separate process, which outlives this one, reads the output of native code, faulthandler and
    child processes from descriptors 1 and 2. A worker gets its parent's `descriptors` as `given`,
    and starts with such descriptors 1 and 2. Output to a terminal is left unchanged.
    """
    if sys.stderr is None or sys.stderr.isatty():
        log.configure(level, worker=worker)
        yield
        return
    kept = tuple(given) or tuple(os.dup(number) for number in _STREAMS.values())
    before = {name: getattr(sys, name) for name in (*_STREAMS, "__stdout__", "__stderr__")}
    taken = {}
    for (name, number), original in zip(_STREAMS.items(), kept, strict=True):
        if not os.isatty(original):
            behind = best_effort(open(original, "w", closefd=False))  # noqa: SIM115
            taken[number] = PrintedLines(number, name, _LEVELS[name], behind)
            # Some libraries print to the streams that the interpreter opened at its start.
            setattr(sys, name, taken[number])
            setattr(sys, f"__{name}__", taken[number])
    log.configure(level, taken[2].behind, worker=worker)
    take_hooks()
    originals = {number: lines.behind.fileno() for number, lines in taken.items()}
    if not given:
        _start_reader(originals)
    try:
        yield
    except BaseException:
        # The command prints the reason for the error itself, as a plain line.
        if not given:
            _give_back(originals)
        raise
    finally:
        for lines in taken.values():
            lines.finish()
        finish(taken[2])
        for name, stream in before.items():
            setattr(sys, name, stream)


def _give_back(originals: Mapping[int, int]) -> None:
    for number, original in originals.items():
        os.dup2(original, number)


def _start_reader(originals: Mapping[int, int]) -> None:
    """Start a process that logs output written to the descriptors to the original stderr."""
    if not hasattr(socket, "SO_PASSCRED"):
        return  # without SO_PASSCRED, native code prints to the original descriptors
    source, sink = socket.socketpair()
    source.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    with sink:
        sink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _MOST_WAIT)
        try:
            reader = _started(source, originals[2])
        except OSError as error:
            source.close()
            _log.warning("output of native code not logged", reason=str(error))
            return
        for number in originals:
            os.dup2(sink.fileno(), number)
    threading.Thread(
        target=_keep_reading, args=(reader, source, originals), name="output", daemon=True
    ).start()


def _started(source: socket.socket, stderr: int) -> "subprocess.Popen[bytes]":
    return start_shielded(
        _READER,
        stdin=source.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,
    )


def _keep_reading(
    reader: "subprocess.Popen[bytes]", source: socket.socket, originals: Mapping[int, int]
) -> None:
    """Start the process again whenever it ends or is stopped (SIGSTOP)."""
    while ended := _ended(reader):
        last_words.tell("output reader", ended, "")
        is_logged = True
        while True:
            time.sleep(_AGAIN_SECONDS)
            try:
                reader = _started(source, originals[2])
                break
            except OSError as error:
                # Keep the socket open: without a reader, SIGPIPE would end native child processes.
                if is_logged:
                    _log.warning("output of native code not logged", reason=str(error))
                is_logged = False
    # A reader exits with 0 at the end of the stream: print any further output unlogged.
    _give_back(originals)


def _ended(reader: "subprocess.Popen[bytes]") -> str:
    """Wait for the end of a process, and return how it ended; empty for exit status 0.

    A stopped process is killed: each write would wait until its send timeout.
    """
    found = os.waitid(os.P_PID, reader.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    is_stopped = found is not None and found.si_code == os.CLD_STOPPED
    if is_stopped:
        reader.kill()
    status = reader.wait()
    how = last_words.how(status) if status else ""
    return f"{how}, because it was stopped" if how and is_stopped else how
