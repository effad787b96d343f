"""Stops onnxruntime runs that exceed a time or memory limit."""

import threading
import time
from typing import Protocol, Self

from xlaserve.process.allocator import resident_bytes

_POLL_SECONDS = 0.1


class _Terminated(Protocol):
    terminate: bool


class Watch:
    """Context manager that enforces a time and a memory limit on an onnxruntime run.

    It sets the run's terminate flag, which onnxruntime checks between operators, also within loops.
    """

    def __init__(self, options: _Terminated, seconds: float, most_bytes: int) -> None:
        self.reason = ""
        """Which limit was exceeded; empty if none."""
        self._options = options
        self._seconds = seconds
        self._most_bytes = most_bytes
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="onnxruntime_watch", daemon=True)

    def __enter__(self) -> Self:
        """Start the watching thread."""
        self._began, self._before = time.monotonic(), resident_bytes() or 0
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop the watching thread."""
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(min(_POLL_SECONDS, self._seconds)):
            if (resident_bytes() or 0) - self._before > self._most_bytes:
                self.reason = f"it took more than {self._most_bytes} bytes"
            elif time.monotonic() - self._began >= self._seconds:
                self.reason = f"it did not end in {self._seconds:g} seconds"
            if self.reason:
                self._options.terminate = True
                return
