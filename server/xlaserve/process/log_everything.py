"""Routes library logs, warnings, uncaught exceptions and stderr output into the log."""

import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TextIO

import structlog

from xlaserve.process.log_limits import MAX_TEXT

_LEAST = logging.WARNING
"""Libraries' records below this level are dropped."""


class LibraryRecords(logging.Handler):
    """Passes records of the standard library's logging to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log a library's record; never raises."""
        try:
            event: dict[str, Any] = {"event": record.getMessage(), "logger": record.name}
            if record.exc_info:
                event["exc_info"] = record.exc_info
            if record.stack_info:
                event["stack"] = record.stack_info
            write(_level_name(record.levelno), event)
        except Exception:
            self.handleError(record)


def write(level: str, event: dict[str, Any]) -> None:
    """Log an event through the configured processors."""
    configured = structlog.get_config()
    logger = configured["logger_factory"]()
    found: Any = event
    with suppress(structlog.DropEvent):
        for processor in configured["processors"]:
            found = processor(logger, level, found)
        logger.msg(found)


def _level_name(number: int) -> str:
    known = (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO)
    names = ("critical", "error", "warning", "info")
    return next((n for least, n in zip(known, names, strict=True) if number >= least), "debug")


def take_libraries() -> None:
    """Route libraries' log records into this log, replacing their handlers."""
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler, LibraryRecords) or type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
    root.addHandler(LibraryRecords(_LEAST))
    root.setLevel(_LEAST)


class StderrLines(io.TextIOBase):
    """Replaces sys.stderr, and logs each printed line."""

    def __init__(self, stream: TextIO) -> None:
        self.behind = stream
        """The wrapped stream."""
        self._part = ""
        self._lock = threading.Lock()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Return the wrapped stream's encoding."""
        return self.behind.encoding

    def fileno(self) -> int:
        """Return the wrapped stream's descriptor, for crash handlers."""
        return self.behind.fileno()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Log each complete line; keep an incomplete one until the rest is written."""
        with self._lock:
            *lines, self._part = (self._part + text).split("\n")
            if len(self._part) > MAX_TEXT:
                lines, self._part = [*lines, self._part], ""
        for line in lines:
            if line.strip():
                write("warning", {"event": "printed on stderr", "line": line})
        return len(text)


@contextmanager
def taken_stderr() -> Iterator[None]:
    """Within this context, log this process's stderr, warnings and uncaught exceptions.

    The hooks for warnings and uncaught exceptions remain after the context. If stderr is a
    terminal, nothing changes. Output of native code and of faulthandler bypasses Python and is not
    logged.
    """
    before = sys.stderr
    if before is None or before.isatty():
        yield
        return
    # Some libraries print to `sys.__stderr__`.
    named = {"stderr": before, "__stderr__": sys.__stderr__}
    lines = StderrLines(before)
    for name in named:
        setattr(sys, name, lines)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    sys.unraisablehook = _unraisable
    warnings.showwarning = _warned
    try:
        yield
    finally:
        for name, stream in named.items():
            setattr(sys, name, stream)


def _uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    write("critical", {"event": "uncaught exception", "exc_info": (kind, error, traceback)})


def _uncaught_in_thread(args: "threading.ExceptHookArgs") -> None:
    if issubclass(args.exc_type, SystemExit):
        return
    name = "" if args.thread is None else args.thread.name
    error = args.exc_value or args.exc_type()
    info = (args.exc_type, error, args.exc_traceback)
    write("error", {"event": "uncaught exception", "thread": name, "exc_info": info})


def _unraisable(args: Any) -> None:
    error = args.exc_value or args.exc_type()
    info = (args.exc_type, error, args.exc_traceback)
    text = f"{args.err_msg or 'Exception ignored in'}: {args.object!r}"
    write("error", {"event": "exception that could not be raised", "of": text, "exc_info": info})


def _warned(  # noqa: PLR0917, as it is called
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    place = f"{filename}:{lineno}"
    event = {"event": str(message), "logger": "warnings", "kind": category.__name__}
    write("warning", {**event, "place": place})
