"""Rereads certificates and other files at SIGHUP, and when the files change.

    reloads.add("tls", certificates.reload, files=certificates.files)

A reload that raises changes nothing: the old contents stay in use, and the failure is logged.
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
"""Rereads a resource, on the event loop. If it raises, the old contents stay in use."""
Wait: TypeAlias = Callable[[Callable[[], "tuple[Mark, ...]"]], Awaitable["tuple[Mark, ...]"]]
"""Calls a function in a thread, because it may block on the file system."""
Mark: TypeAlias = FileMark | None
"""Identity of a file, following symbolic links; None if it is missing."""

CHECK_SECONDS = 5.0
"""Seconds between two checks of the files."""

_log = structlog.get_logger("reloads")


@dataclass(slots=True)
class _Row:
    name: str
    reload: Reload
    files: Sequence[Path]
    marks: tuple[Mark, ...]
    """Identities of the files before they were last read."""
    checking: asyncio.Task[None] | None = None
    """The check in progress, or the last one."""
    is_due: bool = False
    """Whether a reload was requested while the check was running."""


_ALONE_SECONDS = 1.0
"""How long to wait for one check before starting the next one, in seconds."""


class Reloads:
    """Reloadable resources by name, checked in the order they were added. Event loop only.

    `wait` runs a function that may block on files in a thread. `on_signal` is called with True when
    the reloads after a SIGHUP begin, and with False when they have ended.
    """

    def __init__(
        self,
        wait: Wait,
        *,
        check_seconds: float,
        on_signal: Callable[[bool], None] = lambda begins: None,
        notes: EventNotes | None = None,
    ) -> None:
        self._notes = notes or EventNotes()
        self._wait = wait
        self._check_seconds = check_seconds
        self.on_signal = on_signal
        self._rows: list[_Row] = []
        self._requested = asyncio.Event()

    def add(self, name: str, reload: Reload, files: Sequence[Path] = ()) -> None:
        """Reload a resource at SIGHUP, and within seconds after one of its files changes.

        Replacing the directory behind a symbolic link, as Kubernetes does, counts as a change. Call
        this before reading the files for the first time, or a change in between is missed.
        """
        self._rows.append(_Row(name, reload, tuple(files), marks_of(files)))

    def request(self) -> None:
        """Request a reload of everything. Requests made before it starts are coalesced."""
        self._requested.set()

    async def follow(self) -> None:
        """Check for changed files and requests, and reload, until cancelled."""
        while True:
            requested = await self._is_requested()
            if requested:
                self._requested.clear()
                self.on_signal(True)
            try:
                for row in self._rows:
                    await self._check_in_time(row, requested=requested)
            finally:
                if requested:
                    self.on_signal(False)

    async def _is_requested(self) -> bool:
        """Wait for a requested reload until the next check is due; tell whether there was one."""
        try:
            async with asyncio.timeout(self._check_seconds):
                await self._requested.wait()
        except TimeoutError:
            return False
        return True

    async def _check_in_time(self, row: _Row, *, requested: bool) -> None:
        """Check one resource; a slow check continues while the next ones start.

        So an unreadable file does not delay the reload of others, such as revoked credentials.
        """
        if row.checking is not None and not row.checking.done():
            row.is_due = row.is_due or requested
            return
        requested, row.is_due = requested or row.is_due, False
        row.checking = asyncio.ensure_future(self._check(row, requested=requested))
        try:
            await asyncio.wait([row.checking], timeout=_ALONE_SECONDS)
        except asyncio.CancelledError:
            row.checking.cancel()
            raise
        if not row.checking.done():
            _log.warning("reload slow, other files reloaded first", what=row.name)

    async def _check(self, row: _Row, *, requested: bool) -> None:
        # Taken before the files are read: a change during the read is seen by the next check.
        marks = await self._wait(lambda: marks_of(row.files)) if row.files else ()
        if not requested and marks == row.marks:
            return
        row.marks = marks
        because = "SIGHUP" if requested else "a file changed"
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
