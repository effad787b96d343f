"""A text stream whose writes never block and never raise."""

import fcntl
import io
import os
import select
import sys
import termios
import threading
from collections import deque
from contextlib import suppress
from typing import TextIO, cast

_PIPE_BYTES = select.PIPE_BUF
"""A writable pipe accepts this many bytes without blocking."""
_LARGE_PIPE_BYTES = 16 * _PIPE_BYTES
"""A pipe of this size that is at most a quarter full accepts two pages without blocking."""

_POLL_MS = 1000
"""Interval for checking whether a stalled reader has resumed, in milliseconds."""

_MOST_QUEUED_BYTES = 1 << 20
"""Maximum number of bytes queued for a slow reader; further writes are dropped."""

_LAST_SECONDS = 1.0

_STANDARD = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""Names and modes of the first three descriptors."""


class BestEffortStream(io.TextIOBase):
    """Writes to another stream's descriptor without blocking; errors are ignored.

    If the reader is slow, a bounded queue holds the data, and a thread writes it. Otherwise data is
    written immediately, so that none is lost if the process is killed.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._descriptor = _descriptor(stream)
        self._lock = threading.Lock()
        self._poll = select.poll()
        if self._descriptor is not None:
            self._poll.register(self._descriptor, select.POLLOUT)
        self._is_large_pipe = self._descriptor is not None and _is_large_pipe(self._descriptor)
        self._torn = False
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        """Writes queued records; started when a reader first blocks."""
        self.lost = 0
        """Number of writes dropped since the last successful one."""
        self.lost_ever = 0
        """Number of writes dropped since the start."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Return the text encoding."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write or queue the text, or drop it; always returns the length of the text."""
        # At interpreter exit the queue's thread may be stopped while it holds the lock.
        if self._lock.acquire(timeout=_LAST_SECONDS):
            try:
                if self._put(text):
                    self.lost = 0
                else:
                    self._lose()
            finally:
                self._lock.release()
        return len(text)

    def flush(self) -> None:
        """Do nothing: each write is passed on or queued immediately."""

    def finish(self, seconds: float) -> None:
        """Wait for the queue to be written, up to `seconds`; call before the process exits."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue, seconds)

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Tell whether the stream is a terminal."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """Return the descriptor; raises OSError if the stream has none."""
        if self._descriptor is None:
            raise io.UnsupportedOperation("fileno")
        return self._descriptor

    def _put(self, text: str) -> bool:
        if self._descriptor is None:
            return self._put_in_stream(text)
        data = memoryview(text.encode(self.encoding, "backslashreplace"))
        if self._queue:
            return self._enqueue(data)
        if self._torn and data:
            # The previous line was cut off: do not append to it.
            data = memoryview(b"\n" + data)
        rest, failed = self._written_of(self._descriptor, data)
        if failed:
            self._torn = 0 < len(rest) < len(data) or (self._torn and bool(rest))
            return False
        self._torn = False
        if not rest:
            return True
        if self._enqueue(rest):
            return True
        self._torn = len(rest) < len(data)
        return False

    def _written_of(self, descriptor: int, data: memoryview) -> tuple[memoryview, bool]:
        """Write as much as possible; return the unwritten bytes, and whether writing failed."""
        # A broken stream is also reported as writable: `os.write` then raises.
        while data and self._poll.poll(0):
            try:
                data = data[os.write(descriptor, data[: self._piece_bytes(descriptor)]) :]
            except OSError:
                return data, True
        return data, False

    def _piece_bytes(self, descriptor: int) -> int:
        """Return how much to write at once: a whole record if the pipe is nearly empty.

        Other processes write to the same pipe, and their records must not split ours.
        """
        if self._is_large_pipe:
            unread = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
            if int.from_bytes(unread, sys.byteorder) <= _LARGE_PIPE_BYTES // 4:
                return 2 * _PIPE_BYTES
        return _PIPE_BYTES

    # --- the caller holds the lock ---

    def _lose(self) -> None:
        self.lost += 1
        self.lost_ever += 1

    def _enqueue(self, data: memoryview) -> bool:
        if self._queued_bytes + len(data) > _MOST_QUEUED_BYTES:
            return False
        self._queue.append(data)
        self._queued_bytes += len(data)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_queue, name="log", daemon=True)
            self._thread.start()
        self._changed.notify_all()
        return True

    def _write_queue(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
            self._poll.poll(_POLL_MS)
            with self._changed:
                self._write_first()
                if not self._queue:
                    self._changed.notify_all()

    def _write_first(self) -> None:
        """Write as much of the oldest queued text as the reader accepts now."""
        assert self._descriptor is not None
        data = self._queue[0]
        rest, failed = self._written_of(self._descriptor, data)
        self._queued_bytes -= len(data) if failed else len(data) - len(rest)
        if failed:
            self._lose()
            self._torn = len(rest) < len(data)
        if failed or not rest:
            self._queue.popleft()
        else:
            self._queue[0] = rest

    def _put_in_stream(self, text: str) -> bool:
        if self._stream is None:
            return False
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
            return True
        return False


def _is_large_pipe(descriptor: int) -> bool:
    """Tell whether a descriptor is a pipe of at least the default size, as some are smaller."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ) >= _LARGE_PIPE_BYTES
    except (OSError, AttributeError):  # no pipe, or a system without the call
        return False


def best_effort(stream: TextIO | None) -> TextIO:
    """Wrap a stream so that writes never fail; idempotent."""
    if isinstance(stream, BestEffortStream):
        return cast("TextIO", stream)
    return cast("TextIO", BestEffortStream(stream))


def finish(stream: object, seconds: float = _LAST_SECONDS) -> None:
    """Wait up to `seconds` for the stream's queue to be written; call before the process exits."""
    stream = getattr(stream, "behind", stream)
    if isinstance(stream, BestEffortStream):
        stream.finish(seconds)


def open_standard_streams() -> None:
    """Open closed standard streams (stdin, stdout, stderr) on /dev/null.

    Otherwise the next socket would get descriptor 0, 1 or 2, and a client would receive the output
    of some library. sys.stdout and the like, which Python sets to None then, are opened too.
    """
    for descriptor, (name, mode) in enumerate(_STANDARD):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115


def flushed(stream: TextIO | None) -> OSError | None:
    """Flush a stream; on failure, redirect it to /dev/null and return the error."""
    if stream is None:
        return None
    try:
        stream.flush()
    except OSError as error:
        # Otherwise the interpreter flushes again at exit, fails, and changes the exit status.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return error
    return None


def _descriptor(stream: TextIO | None) -> int | None:
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None
