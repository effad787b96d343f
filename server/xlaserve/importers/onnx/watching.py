"""Ends an execution of onnxruntime that takes too long, or too much memory."""

import threading
import time
from typing import Protocol, Self

from xlaserve.process.allocator import resident_bytes

_LOOK_SECONDS = 0.1


class _Terminated(Protocol):
    terminate: bool


class Watch:
    """A context that enforces limits of time and memory on onnxruntime.

    What runs is told to stop, which onnxruntime sees before the next operator, in loops as well.
    """

    def __init__(self, options: _Terminated, seconds: float, most_bytes: int) -> None:
        self.reason = ""
        """Why it was ended; empty where it was not."""
        self._options = options
        self._seconds = seconds
        self._most_bytes = most_bytes
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="onnxruntime_watch", daemon=True)

    def __enter__(self) -> Self:
        """Begin to look."""
        self._began, self._before = time.monotonic(), resident_bytes() or 0
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop watching."""
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(min(_LOOK_SECONDS, self._seconds)):
            if (resident_bytes() or 0) - self._before > self._most_bytes:
                self.reason = f"it took more than {self._most_bytes} bytes"
            elif time.monotonic() - self._began >= self._seconds:
                self.reason = f"it did not end in {self._seconds:g} seconds"
            if self.reason:
                self._options.terminate = True
                return
