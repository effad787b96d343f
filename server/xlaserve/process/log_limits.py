"""Limits the length of log records, and the number of tracebacks per minute."""

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import structlog

MAX_TEXT = 4096
"""Maximum length of a logged value, in characters; names and texts may come from clients."""

MAX_RECORD_BYTES = 8192
"""Maximum size of a JSON record."""

TRACEBACKS_PER_MINUTE = 100
"""Maximum number of tracebacks per minute, so that failing requests cannot fill the disk."""

_MINUTE_SECONDS = 60.0


def bounded_values(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Truncate every string to `MAX_TEXT` (a structlog processor)."""
    for key, value in event.items():
        if isinstance(value, str) and len(value) > MAX_TEXT:
            event[key] = value[:MAX_TEXT] + "..."
    return event


def render_json(_logger: object, _method: str, event: structlog.typing.EventDict) -> str:
    """Return the record as one line of ASCII JSON of at most `MAX_RECORD_BYTES` (a processor).

    The strings of a longer record are shortened in the middle, since the end of a traceback names
    the error.
    """
    record = dict(event)
    text = json.dumps(record, default=str)
    most = MAX_TEXT
    while len(text) > MAX_RECORD_BYTES and most:
        record = {key: _cut(value, most) for key, value in record.items()}
        text = json.dumps(record, default=str)
        most //= 2
    return text


def _cut(value: object, most: int) -> object:
    text = value if isinstance(value, str) else None
    if text is None:
        # Short values, such as numbers, stay unchanged; a long list or object is truncated.
        text = json.dumps(value, default=str)
        return value if len(text) <= most else f"{text[:most]}..."
    if len(text) <= most:
        return text
    return f"{text[: most // 4]} ... {text[-most * 3 // 4 :]}"


class TracebackLimit:
    """Limits tracebacks per minute; further ones are replaced by the error's text.

    A structlog processor. Thread-safe.
    """

    def __init__(
        self,
        per_minute: int = TRACEBACKS_PER_MINUTE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._lock = threading.Lock()
        self._until = clock() + _MINUTE_SECONDS
        self._count = 0
        self._left_out = 0

    def __call__(
        self, _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """Return the record with its traceback, or with only the error's text."""
        if not event.get("exc_info"):
            return event
        allowed, left_out = self._take()
        if left_out:
            event["tracebacks_left_out"] = left_out
        if not allowed:
            event["error"] = _named(event.pop("exc_info"))
        return event

    def _take(self) -> tuple[bool, int]:
        """Return whether a traceback is allowed, and how many the previous minute left out."""
        with self._lock:
            now, left_out = self._clock(), 0
            if now >= self._until:
                self._until = now + _MINUTE_SECONDS
                left_out, self._left_out, self._count = self._left_out, 0, 0
            if self._count < self._per_minute:
                self._count += 1
                return True, left_out
            self._left_out += 1
            return False, left_out


def _named(info: Any) -> str:
    error = info if isinstance(info, BaseException) else None
    if error is None:
        error = (info if isinstance(info, tuple) else sys.exc_info())[1]
    return f"{type(error).__name__}: {error}"[:MAX_TEXT]
