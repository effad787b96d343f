"""A server in a child process: its start, its addresses, its log, its end."""

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
"""Seconds between SIGTERM and SIGKILL: twice the drain's limit."""
_SHOWN_BYTES = 2000
"""Bytes at the end of the log that an error has where the server ended without a word."""


class NotServing(XlaserveError):
    """A server started from Python has failed, or one of its models."""


@dataclass(frozen=True, slots=True)
class Row:
    """One version of a model as the start left it."""

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
    """One server; used from one thread at a time. `stop` ends it, and so does the end of Python."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Start it with these settings; `started` says how that went."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, it is written to until `close`
        # Without the working directory on the path: a file there may be called like a module.
        command = [sys.executable, "-P", "-m", "xlaserve.local.child"]
        # In its own session: Ctrl-C in a terminal is meant for the caller, not for the server.
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
        # Without seeking: the server writes where the offset is, which both have.
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    @property
    def is_running(self) -> bool:
        """Tell whether the server has not ended."""
        return self._process.poll() is None

    def started(self, seconds: float) -> Started:
        """Return once every load of the start has ended; raises NotServing."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        found, said = Started(), b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                text = f"the server had not started after {seconds:g} seconds (start_seconds)"
                raise NotServing(f"{text}{self._last_words()}")
            part = os.read(descriptor, 1 << 16)
            if not part:
                status = self._process.wait()
                raise NotServing(f"the server ended with status {status}{self._last_words()}")
            *lines, said = (said + part).split(b"\n")
            for line in lines:
                what = json.loads(line)
                if "failed" in what:
                    raise NotServing(what["failed"])
                if "models" in what:
                    found.models = [Row(*row) for row in what["models"]]
                    return found
                found.grpc, found.http = what["grpc"], what["http"]

    def stop(self) -> None:
        """Have the server drain and end, and return once it has; once is enough."""
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
        """Stop it, and forget its log."""
        self.stop()
        self._log.close()

    def _last_words(self) -> str:
        text = self.log[-_SHOWN_BYTES:].strip()
        return f"; last lines of its log:\n{text}" if text else ""
