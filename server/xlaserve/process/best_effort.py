"""A text stream that drops what cannot be written, without an error for any caller."""

import io
import os
import select
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import TextIO, cast

_PIPE_BYTES = select.PIPE_BUF
"""A pipe that can be written to takes so many without waiting."""

_LOOK_MS = 1000
"""Milliseconds between two looks whether a reader that has stopped reads again."""

_MOST_QUEUED_BYTES = 1 << 20
"""Limit of bytes queued for a slow reader; further ones are lost."""

_LAST_SECONDS = 1.0

_STANDARD = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""Names and modes of the first three descriptors."""


class BestEffortStream(io.TextIOBase):
    """Writes to another stream's descriptor without blocking; errors are ignored.

    Nor does a reader that does not read hold the writer up: what it does not take waits in a queue,
    of bounded size, for a thread to write it. While the queue is empty nothing is there that could
    be lost with the process.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._descriptor = _descriptor(stream)
        self._lock = threading.Lock()
        self._poll = select.poll()
        if self._descriptor is not None:
            self._poll.register(self._descriptor, select.POLLOUT)
        self._torn = False
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        """Writes queued records; started when a reader first blocks."""
        self.lost = 0
        """Writes that were lost since the last one that was not."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Return the text encoding."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write as much as possible; always returns the length of the text."""
        # As the interpreter ends, the thread of the queue may be stopped while it has the lock.
        if self._lock.acquire(timeout=_LAST_SECONDS):
            try:
                self.lost = 0 if self._put(text) else self.lost + 1
            finally:
                self._lock.release()
        return len(text)

    def flush(self) -> None:
        """Do nothing: writes are immediate, and unread data is already queued."""

    def finish(self, seconds: float) -> None:
        """Wait until the queue is written, so many seconds at most: the process ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue, seconds)

    def writable(self) -> bool:
        """Tell that it takes text."""
        return True

    def isatty(self) -> bool:
        """Tell whether a person reads it."""
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
            # Half a line is there; what follows is not to become its end.
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
        """Return the unwritten bytes, and whether the stream is broken."""
        # It polls also true where the write will fail: that is for the write to say.
        while data and self._poll.poll(0):
            try:
                data = data[os.write(descriptor, data[:_PIPE_BYTES]) :]
            except OSError:
                return data, True
        return data, False

    # --- the queue; all of it under the lock ---

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
            self._poll.poll(_LOOK_MS)
            with self._changed:
                self._write_first()
                if not self._queue:
                    self._changed.notify_all()

    def _write_first(self) -> None:
        """Write as much of the oldest text as its reader takes now."""
        assert self._descriptor is not None
        data = self._queue[0]
        rest, failed = self._written_of(self._descriptor, data)
        self._queued_bytes -= len(data) if failed else len(data) - len(rest)
        if failed:
            self.lost += 1
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


def best_effort(stream: TextIO | None) -> TextIO:
    """Wrap a stream so that writes never fail; idempotent."""
    if isinstance(stream, BestEffortStream):
        return cast("TextIO", stream)
    return cast("TextIO", BestEffortStream(stream))


def finish(stream: object, seconds: float = _LAST_SECONDS) -> None:
    """Give the reader of a stream a bounded time to take what waits for it: the process ends."""
    stream = getattr(stream, "behind", stream)
    if isinstance(stream, BestEffortStream):
        stream.finish(seconds)


def open_standard_streams() -> None:
    """Open closed standard streams (stdin, stdout, stderr) on /dev/null.

    Otherwise the next socket becomes one of them, and what a library prints goes to a client. In
    such a process sys.stdout and the like are None: to write to them, or to ask for their
    descriptor, is an error.
    """
    for descriptor, (name, mode) in enumerate(_STANDARD):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115


def flushed(stream: TextIO | None) -> OSError | None:
    """Flush a stream; on failure, return the error and discard later writes."""
    if stream is None:
        return None
    try:
        stream.flush()
    except OSError as error:
        # Else the interpreter tries again at its end, and changes the exit status.
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
