"""Output of the access log: a file that may be rotated, or a descriptor."""

import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from xlaserve.errors import InvalidSettings
from xlaserve.process.output import descriptors

_SETTING = "access_log"
_EXPECTED = "a path, stderr, stdout, or fd:<number>"
_STANDARD = ("stdout", "stderr")
_DESCRIPTOR = "fd:"
_ALIASES = {
    **dict.fromkeys(("/dev/stdout", "/proc/self/fd/1"), "stdout"),
    **dict.fromkeys(("/dev/stderr", "/proc/self/fd/2"), "stderr"),
}
"""Paths of the standard streams. They may be sockets, which cannot be opened by path."""
_MODE = 0o640
_PIPE_BYTES = select.PIPE_BUF
"""Maximum size of an atomic write to a pipe."""
_PATIENCE_MS = 1000
_CHECK_SECONDS = 1.0
"""Interval between checks whether the file was rotated."""


class AccessFile:
    """Writes whole lines. Blocks; use from one thread at a time."""

    def __init__(self, target: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the target; raises InvalidSettings if that fails."""
        self._clock = clock
        self._checked = clock()
        self._path: Path | None = None
        self._torn = False
        """Whether the file ends with a partial line, which the next write must not continue."""
        target = _ALIASES.get(target, target)
        if target in _STANDARD or target.startswith(_DESCRIPTOR):
            self._descriptor = _descriptor(target)
            return
        self._path = Path(target)
        try:
            self._descriptor = _open(self._path)
        except OSError as error:
            raise InvalidSettings(
                _SETTING, f"a file that can be written ({error})", target
            ) from error

    def parts(self, lines: bytes) -> Iterator[bytes]:
        """Split lines into single writes: all lines for a file, up to PIPE_BUF for a pipe."""
        start, end = 0, len(lines)
        while self._path is None and end - start > _PIPE_BYTES:
            cut = lines.rfind(b"\n", start, start + _PIPE_BYTES) + 1
            cut = cut or lines.index(b"\n", start) + 1  # a single line that is longer
            yield lines[start:cut]
            start = cut
        yield lines[start:]

    def write(self, line: bytes) -> bool:
        """Write lines; return False if they could not be written completely."""
        data = memoryview(b"\n" + line if self._torn else line)
        rest = data
        while rest and self._takes_more():
            part = rest if self._path else rest[:_PIPE_BYTES]
            try:
                rest = rest[os.write(self._descriptor, part) :]
            except OSError:
                break
        written = len(data) - len(rest)
        if not rest:
            self._torn = False
        elif written and not self._took_back(written):
            self._torn = True
        return not rest

    def check_rotation(self) -> None:
        """Reopen the file if it was renamed or removed; checks at most once a second."""
        now = self._clock()
        if self._path is None or now - self._checked < _CHECK_SECONDS:
            return
        self._checked = now
        with suppress(OSError):
            mine = os.fstat(self._descriptor)
            with suppress(FileNotFoundError):
                found = self._path.stat()
                if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
                    return
            self.reopen()

    def reopen(self) -> None:
        """Reopen the file by name; raises OSError and keeps the old one if that fails."""
        if self._path is not None:
            opened = _open(self._path)
            os.close(self._descriptor)
            self._descriptor = opened
            self._torn = False

    def close(self) -> None:
        """Close the file; descriptors passed by number stay open."""
        if self._path is not None:
            os.close(self._descriptor)

    def _took_back(self, written: int) -> bool:
        """Truncate a partial write; return False if another process has written since."""
        if self._path is None:
            return False
        with suppress(OSError):
            end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
            if os.fstat(self._descriptor).st_size == end:
                os.ftruncate(self._descriptor, end - written)
                return True
        return False

    def _takes_more(self) -> bool:
        if self._path is not None:
            return True
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        # Also true if the write will fail, which the caller then handles.
        return bool(poll.poll(_PATIENCE_MS))


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)


def _descriptor(target: str) -> int:
    text = target.removeprefix(_DESCRIPTOR)
    number = int(text) if text.isascii() and text.isdigit() else -1
    if target in _STANDARD:
        number = 1 + _STANDARD.index(target)
    if number in (1, 2):
        # Use the original stream instead of a descriptor whose output is read to be logged.
        number = descriptors()[number - 1]
    try:
        os.fstat(number)
    except (OSError, OverflowError) as error:
        raise InvalidSettings(_SETTING, _EXPECTED, target) from error
    return number
