"""Files opened below directories by any code, as reported by the kernel."""

import ctypes
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ACCESS, _OPEN, _OVERFLOW = 0x1, 0x20, 0x4000
_EVENT = struct.Struct("iIII")
_READ_BYTES = 1 << 20


class Opened:
    """Files and directories opened or read since the last query."""

    def __init__(self, queue: int, watched: dict[int, Path]) -> None:
        self._queue = queue
        self._watched = watched

    def since(self) -> list[str]:
        """Return their paths without duplicates."""
        found: dict[str, None] = {}
        while True:
            try:
                events = os.read(self._queue, _READ_BYTES)
            except BlockingIOError:
                return list(found)
            at = 0
            while at < len(events):
                watch, mask, _, size = _EVENT.unpack_from(events, at)
                assert not mask & _OVERFLOW
                name = events[at + _EVENT.size :][:size].rstrip(b"\0").decode()
                found[str(self._watched[watch] / name)] = None
                at += _EVENT.size + size


@contextmanager
def opened(*roots: Path) -> Iterator[Opened]:
    """Watch directories recursively for the duration of a block (inotify(7))."""
    assert sys.platform == "linux"
    libc = ctypes.CDLL(None, use_errno=True)
    queue = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert queue >= 0, os.strerror(ctypes.get_errno())
    try:
        watched = {}
        for root in roots:
            for path in (root, *(path for path in root.rglob("*") if path.is_dir())):
                watch = libc.inotify_add_watch(queue, os.fsencode(path), _ACCESS | _OPEN)
                assert watch >= 0, os.strerror(ctypes.get_errno())
                watched[watch] = path
        seen = Opened(queue, watched)
        seen.since()  # listing the directories above has opened them
        yield seen
    finally:
        os.close(queue)
