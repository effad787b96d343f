"""structlog, configured once: JSON lines, or readable lines in a terminal."""

import logging
import sys
from typing import TextIO

import structlog

from xlaserve.best_effort import best_effort

MAX_TEXT = 4096
"""Characters of one logged value; names and texts of clients end up here."""


def _bounded(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    for key, value in event.items():
        if isinstance(value, str) and len(value) > MAX_TEXT:
            event[key] = value[:MAX_TEXT] + "..."
    return event


class _Lost:
    def __init__(self, target: TextIO) -> None:
        self._target = target

    def __call__(
        self, _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        lost = getattr(self._target, "lost", 0)
        return {**event, "lost_before": lost} if lost else event


def configure(level: str = "info", stream: TextIO | None = None) -> None:
    """Set up logging for the process. The one piece of global state that the server has.

    JSON escapes line ends and control characters, and so does the console's repr: a name that a
    client chose cannot forge a record. What cannot be written is lost, and the next record says how
    many were (`lost_before`): a log never changes what is done.
    """
    target = best_effort(stream or sys.stderr)
    renderers: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(pad_event_to=32)]
        if target.isatty()
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _bounded,
            _Lost(target),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(file=target),
        cache_logger_on_first_use=False,
    )
    # The libraries below us log through the standard library: warnings and worse are enough.
    logging.basicConfig(level=logging.WARNING, stream=target, format="%(name)s: %(message)s")
