"""The registry of reloadable resources: reread at SIGHUP and when their files change.

    reloads.add("tls", certificates.reload, files=certificates.files)

A reload that raises has changed nothing: what was read before stays in use, and the log says why.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import structlog

from xlaserve.errors import XlaserveError
from xlaserve.errors.panics import ENDS
from xlaserve.files.marks import FileMark, mark_of
from xlaserve.serving.observability.event_notes import EventNotes

Reload: TypeAlias = Callable[[], Awaitable[None] | None]
"""Reads something again, on the event loop; or raises, keeping the old contents."""
Wait: TypeAlias = Callable[[Callable[[], "tuple[Mark, ...]"]], Awaitable["tuple[Mark, ...]"]]
"""Calls a function in a thread that may block on files."""
Mark: TypeAlias = FileMark | None
"""Identity of a file after following links; None if it is missing."""

LOOK_SECONDS = 5.0
"""Seconds between two checks of the files."""

_log = structlog.get_logger("reloads")


@dataclass(slots=True)
class _Row:
    name: str
    reload: Reload
    files: Sequence[Path]
    marks: tuple[Mark, ...]
    """The files as they were before they were read last."""
    looking: asyncio.Task[None] | None = None
    """The running or last check."""
    is_due: bool = False
    """Whether a reload was requested during the check."""


_ALONE_SECONDS = 1.0
"""Time for one row before the next is checked."""


class Reloads:
    """Reloads by name, in the order in which they were added; of the event loop.

    `wait` calls a function that looks at files in a thread that may wait. `on_signal` is told when
    the reloads of a SIGHUP begin, and when they have ended.
    """

    def __init__(
        self,
        wait: Wait,
        *,
        look_seconds: float,
        on_signal: Callable[[bool], None] = lambda begins: None,
        notes: EventNotes | None = None,
    ) -> None:
        self._notes = notes or EventNotes()
        self._wait = wait
        self._look_seconds = look_seconds
        self.on_signal = on_signal
        self._rows: list[_Row] = []
        self._asked = asyncio.Event()

    def add(self, name: str, reload: Reload, files: Sequence[Path] = ()) -> None:
        """Reload something at SIGHUP, and within seconds after one of its files changed.

        A file that was replaced through a link to a directory, as Kubernetes does it, has changed.
        To be called before the files are read for the first time, or a change between is missed.
        """
        self._rows.append(_Row(name, reload, tuple(files), marks_of(files)))

    def request(self) -> None:
        """Request a reload of everything; concurrent requests are one more reload."""
        self._asked.set()

    async def follow(self) -> None:
        """Reload whatever is due, until cancelled."""
        while True:
            asked = await self._is_asked()
            if asked:
                self._asked.clear()
                self.on_signal(True)
            try:
                for row in self._rows:
                    await self._look_in_time(row, asked=asked)
            finally:
                if asked:
                    self.on_signal(False)

    async def _is_asked(self) -> bool:
        """Return whether a reload was requested by the next check."""
        try:
            async with asyncio.timeout(self._look_seconds):
                await self._asked.wait()
        except TimeoutError:
            return False
        return True

    async def _look_in_time(self, row: _Row, *, asked: bool) -> None:
        """Reload a row that is due; one that takes long goes on beside the others.

        What is to be revoked is behind no file that cannot be read.
        """
        if row.looking is not None and not row.looking.done():
            row.is_due = row.is_due or asked
            return
        asked, row.is_due = asked or row.is_due, False
        row.looking = asyncio.ensure_future(self._look(row, asked=asked))
        try:
            await asyncio.wait([row.looking], timeout=_ALONE_SECONDS)
        except asyncio.CancelledError:
            row.looking.cancel()
            raise
        if not row.looking.done():
            _log.warning("slow to read, others proceed", what=row.name)

    async def _look(self, row: _Row, *, asked: bool) -> None:
        # Before the files are read: what changes while they are is seen at the next look.
        marks = await self._wait(lambda: marks_of(row.files)) if row.files else ()
        if not asked and marks == row.marks:
            return
        row.marks = marks
        because = "SIGHUP" if asked else "a file changed"
        try:
            result = row.reload()
            if inspect.isawaitable(result):
                await result
        except (XlaserveError, OSError) as error:
            _log.error("not reloaded", what=row.name, because=because, reason=str(error))
            self._notes.read_again(row.name, because, str(error))
        except ENDS:
            raise
        except BaseException as error:
            _log.exception("not reloaded", what=row.name, because=because)
            self._notes.read_again(row.name, because, f"internal error: {type(error).__name__}")
        else:
            self._notes.read_again(row.name, because)
            _log.info("reloaded", what=row.name, because=because)


def marks_of(files: Sequence[Path]) -> tuple[Mark, ...]:
    """Return the identities of files, which differ after a change."""
    return tuple(_mark(file) for file in files)


def _mark(file: Path) -> Mark:
    try:
        return mark_of(file.stat())
    except OSError:
        return None
