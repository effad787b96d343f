"""A server in a child process: startup, addresses, log, shutdown."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from xlaserve.errors import XlaserveError

STOP_SECONDS = 60.0
"""Time in seconds between SIGTERM and SIGKILL: twice the drain's limit."""
_SHOWN_BYTES = 2000
"""Number of bytes from the end of the log to show if the server ended without a message."""


class NotServing(XlaserveError):
    """A server started from Python has failed, or one of its models has."""


@dataclass(frozen=True, slots=True)
class Row:
    """One version of a model, and how its load at startup ended."""

    name: str
    version: str
    state: str
    reason: str


@dataclass(slots=True)
class Started:
    """A running server."""

    grpc: str = ""
    http: str = ""
    models: Sequence[Row] = field(default_factory=tuple)


class ServerProcess:
    """A server process; not thread-safe. It ends with `stop`, or when Python exits."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Start the process with these settings; `started` waits for the result."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, it is written to until `close`
        # -P: a file in the working directory must not shadow a module.
        command = [sys.executable, "-P", "-m", "xlaserve.local.child"]
        # A new session: Ctrl-C in the terminal should only interrupt the caller.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def log(self) -> str:
        """Return the server's log so far."""
        size = os.fstat(self._log.fileno()).st_size
        # Use pread, not seek: the server appends at the file offset, which both processes share.
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    @property
    def is_running(self) -> bool:
        """Tell whether the process is still running."""
        return self._process.poll() is None

    def started(self, seconds: float) -> Started:
        """Wait until all loads at startup have ended; raises NotServing."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        found, rest = Started(), b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                text = f"the server had not started after {seconds:g} seconds (start_seconds)"
                raise NotServing(f"{text}{self._last_words()}")
            part = os.read(descriptor, 1 << 16)
            if not part:
                status = self._process.wait()
                raise NotServing(f"the server ended with status {status}{self._last_words()}")
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                what = json.loads(line)
                if "failed" in what:
                    raise NotServing(what["failed"])
                if "models" in what:
                    found.models = [Row(*row) for row in what["models"]]
                    return found
                found.grpc, found.http = what["grpc"], what["http"]

    def stop(self) -> None:
        """Drain and stop the server; returns once it has exited. Idempotent."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Stop the server, and discard its log."""
        self.stop()
        self._log.close()

    def _last_words(self) -> str:
        text = self.log[-_SHOWN_BYTES:].strip()
        return f"; last lines of its log:\n{text}" if text else ""
