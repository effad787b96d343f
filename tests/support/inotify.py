"""What is opened below directories, by whatever code: as the kernel tells it."""

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
    """The files and directories that were opened or read since it was asked last."""

    def __init__(self, queue: int, watched: dict[int, Path]) -> None:
        self._queue = queue
        self._watched = watched

    def since(self) -> list[str]:
        """Return their paths, each once."""
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
    """Watch directories, and all below them, for the length of a block (inotify(7))."""
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
        seen.since()  # to look for directories has opened them
        yield seen
    finally:
        os.close(queue)
