"""Configures structlog: JSON lines, or readable lines in a terminal."""

import logging
import sys
from dataclasses import dataclass
from typing import Self, TextIO

import structlog

from xlaserve.process.best_effort import best_effort
from xlaserve.process.log_everything import take_libraries
from xlaserve.process.log_limits import TracebackLimit, bounded_values, render_json


class _Lost:
    def __init__(self, target: TextIO) -> None:
        self._target = target

    @property
    def ever(self) -> int:
        return getattr(self._target, "lost_ever", 0)

    def __call__(
        self, _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        lost = getattr(self._target, "lost", 0)
        return {**event, "lost_before": lost} if lost else event


@dataclass(frozen=True, slots=True)
class _Worker:
    number: int

    def __call__(
        self, _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        return {**event, "worker": self.number}


@dataclass(frozen=True, slots=True)
class Levels:
    """The enabled log levels; a processor that drops all other records."""

    verbose_level: int = 1
    """Debug records are enabled from 1 on."""
    info: bool = True
    warning: bool = True
    error: bool = True

    @classmethod
    def from_lowest(cls, name: str) -> Self:
        """Return the levels from `name` upwards."""
        least = logging.getLevelNamesMapping()[name.upper()]
        of_level = (logging.INFO, logging.WARNING, logging.ERROR)
        return cls(int(least <= logging.DEBUG), *(least <= level for level in of_level))

    def __call__(
        self, _logger: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """Return the record if its level is enabled; otherwise raise DropEvent."""
        if not self._has(str(event.get("level", method))):
            raise structlog.DropEvent
        return event

    @property
    def lowest(self) -> int:
        """Return the lowest enabled level."""
        kinds = ("debug", "info", "warning", "error")
        least = next((kind for kind in kinds if self._has(kind)), "critical")
        return logging.getLevelNamesMapping()[least.upper()]

    def _has(self, level: str) -> bool:
        kinds = {"debug": self.verbose_level > 0, "info": self.info, "warning": self.warning}
        return kinds.get(level, self.error)


def levels() -> Levels:
    """Return the log levels of this process."""
    processors = structlog.get_config()["processors"]
    return next((found for found in processors if isinstance(found, Levels)), Levels())


def lost_records() -> int:
    """Return the number of records that this process could not write."""
    processors = structlog.get_config()["processors"]
    return sum(found.ever for found in processors if isinstance(found, _Lost))


def set_levels(changed: Levels) -> None:
    """Change the log levels of this process."""
    processors = structlog.get_config()["processors"]
    others = [processor for processor in processors if not isinstance(processor, Levels)]
    structlog.configure(
        processors=[changed, *others],
        # Loggers skip records below this level without building them.
        wrapper_class=structlog.make_filtering_bound_logger(changed.lowest),
    )


def configure(
    level: str = "info", stream: TextIO | None = None, *, worker: int | None = None
) -> None:
    """Configure logging for this process, the only global state of the server.

    Both JSON and the console's repr escape line breaks and control characters, so that a name from
    a client cannot forge a record. Logging never blocks or fails: records that cannot be written
    are dropped, and the next record has their number (`lost_before`). If there are several worker
    processes, each record has the `worker`.
    """
    target = best_effort(stream or sys.stderr)
    renderers: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(pad_event_to=32)]
        if target.isatty()
        else [structlog.processors.format_exc_info, render_json]
    )
    structlog.configure(
        processors=[
            Levels.from_lowest(level),
            structlog.contextvars.merge_contextvars,
            *([] if worker is None else [_Worker(worker)]),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            bounded_values,
            TracebackLimit(),
            _Lost(target),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(file=target),
        cache_logger_on_first_use=False,
    )
    # Libraries log through the standard library; their warnings and errors are logged here.
    take_libraries()
