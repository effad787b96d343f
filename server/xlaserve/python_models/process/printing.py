"""Writes output and log records of a model's process into the server's log."""

import os
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import structlog

from xlaserve.process.output_reader import CHUNK_BYTES, OutputLines
from xlaserve.python_models.process.pipe import Pipe, PipeError

_LOGGED = 10_000
"""Maximum length of a logged event or value, in characters."""
_LINES_PER_SECOND = 200
"""Maximum number of lines per second that one process may log; others are dropped."""
_LEVELS = frozenset(("debug", "info", "warning", "error", "critical"))


class ProcessLog:
    """Logs the lines of one process, up to a rate limit. Thread-safe."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._lock = threading.Lock()
        """Guards the counters."""
        self._second = self._count = self._dropped = 0

    def printed(self, _pid: int, line: str, cut_bytes: int) -> None:
        """Log a line that the process printed."""
        if self._takes():
            more = {"cut_bytes": cut_bytes} if cut_bytes else {}
            self._log.info("output of model process", line=line, **more)

    def logged(self, level: str, event: str, fields: Mapping[str, str]) -> None:
        """Log a record of the process at its level."""
        if self._takes():
            own = {name: value for name, value in fields.items() if name not in ("event", "model")}
            getattr(self._log, level if level in _LEVELS else "info")(event, **own)

    def end(self) -> None:
        """Log how many lines were dropped since the last report, if any."""
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            self._log.warning("output of model process dropped", lines=dropped)

    def _takes(self) -> bool:
        now = int(time.monotonic())
        with self._lock:
            is_new, self._second = now != self._second, now
            self._count = 1 if is_new else self._count + 1
            is_taken = self._count <= _LINES_PER_SECOND
            self._dropped += not is_taken
        if is_new:
            self.end()
        return is_taken


def log_printed(process: "subprocess.Popen[bytes]", log: ProcessLog) -> None:
    """Log each line that a process prints, until it closes its output. Blocks."""
    assert process.stdout is not None
    with process.stdout as output:
        descriptor = output.fileno()
        OutputLines(log.printed).read(descriptor, lambda: (0, os.read(descriptor, CHUNK_BYTES)))
    log.end()


def log_to(pipe: Pipe) -> None:
    """Send this process's log records to the server, which applies its own levels and settings."""

    def forward(logger: Any, method: str, event: Any) -> Any:
        header = {"kind": "log", "level": method, "event": str(event.pop("event", ""))[:_LOGGED]}
        fields = {str(name): str(value)[:_LOGGED] for name, value in event.items()}
        with suppress(PipeError):
            pipe.send({**header, "fields": fields})
        raise structlog.DropEvent

    structlog.configure(
        processors=[
            structlog.processors.format_exc_info,
            forward,
        ]
    )
