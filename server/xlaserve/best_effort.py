"""A text stream that drops what cannot be written, without an error for any caller."""

import io
import os
import select
import threading
from contextlib import suppress
from typing import TextIO, cast

_PIPE_BYTES = select.PIPE_BUF
"""A pipe that can be written to takes so many without waiting."""

_PATIENCE_MS = 1000
"""Milliseconds, once, for a reader that has stopped to read again."""

_STANDARD = (0, 1, 2)


class BestEffortStream(io.TextIOBase):
    """Writes to the descriptor of another stream at once; a full disk or a lost reader is no error.

    Nor does a reader that does not read hold the writer up for more than a second.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._descriptor = _descriptor(stream)
        self._lock = threading.Lock()
        self._poll = select.poll()
        if self._descriptor is not None:
            self._poll.register(self._descriptor, select.POLLOUT)
        self._stalled = False
        self._torn = False
        self.lost = 0
        """Writes that were lost since the last one that was not."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Return how text becomes bytes."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write what can be written; always returns the length of the text."""
        with self._lock:
            if self._put(text):
                self.lost = 0
            else:
                self.lost += 1
        return len(text)

    def flush(self) -> None:
        """Do nothing: what could be written is written."""

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
        """Return the descriptor; raises OSError where there is none."""
        if self._descriptor is None:
            raise io.UnsupportedOperation("fileno")
        return self._descriptor

    def _put(self, text: str) -> bool:
        if self._descriptor is None:
            return self._put_in_stream(text)
        data = memoryview(text.encode(self.encoding, "backslashreplace"))
        if self._torn and data:
            # Half a line is there; what follows is not to become its end.
            data = memoryview(b"\n" + data)
        rest = self._written_of(self._descriptor, data)
        self._torn = len(rest) < len(data) if rest else False
        return not rest

    def _written_of(self, descriptor: int, data: memoryview) -> memoryview:
        """Return what could not be written."""
        while data and self._takes_more():
            try:
                data = data[os.write(descriptor, data[:_PIPE_BYTES]) :]
            except OSError:
                break
        return data

    def _takes_more(self) -> bool:
        # Also true where the write will fail: that is for the write to say.
        ready = bool(self._poll.poll(0 if self._stalled else _PATIENCE_MS))
        self._stalled = not ready
        return ready

    def _put_in_stream(self, text: str) -> bool:
        if self._stream is None:
            return False
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
            return True
        return False


def best_effort(stream: TextIO | None) -> TextIO:
    """Return a stream as one that never fails; one that does not already is returned as it is."""
    if isinstance(stream, BestEffortStream):
        return cast("TextIO", stream)
    return cast("TextIO", BestEffortStream(stream))


def open_standard_descriptors() -> None:
    """Open those of stdin, stdout and stderr that are closed on /dev/null.

    Otherwise the next socket becomes one of them, and what a library prints goes to a client.
    """
    for descriptor in _STANDARD:
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def flushed(stream: TextIO | None) -> OSError | None:
    """Write what a stream still holds; returns the error, after which it writes to nowhere."""
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
