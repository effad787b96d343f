"""Memory shared with a model's process: one side writes tensors, the other reads.

It is a memfd: it has no name that anybody would have to remove, and is gone with the last process
that has it mapped, however that ends. Its size is sealed, so that neither side can truncate it
under the other, which would be a SIGBUS there.
"""

import fcntl
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np

from xlaserve.tensors import ALIGNMENT

LEAST_BYTES = 64 << 10
"""Tensors of a message with fewer bytes go through the pipe, which is as quick then."""

_PAGE = mmap.PAGESIZE


class SlabError(Exception):
    """The other side named invalid memory."""


def aligned(count: int) -> int:
    """Return a size rounded up, so that the next tensor begins where XLA reads it in place."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def make_slab(size: int) -> int:
    """Return the descriptor of a slab; -1 where this system has none."""
    if not size or sys.platform != "linux":
        return -1
    descriptor = os.memfd_create("xlaserve-python", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class SlabWriter:
    """Writes tensors into a slab. Thread-safe."""

    def __init__(self, descriptor: int) -> None:
        """Map a slab; the descriptor may be closed then."""
        size = os.fstat(descriptor).st_size
        self._bytes = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        self._lock = threading.Lock()
        """Held for what is free, and what is not."""
        self._free: list[tuple[int, int]] = [(0, size)]
        """Start and end of what is free, in order and with something between any two."""
        self._taken: dict[int, int] = {}
        """End by start."""

    def write(self, parts: Sequence[bytes | memoryview]) -> int | None:
        """Copy tensors into memory of their own; return where that begins, or None.

        It is theirs until it is released.
        """
        start = self._take(sum(aligned(len(part)) for part in parts))
        if start is not None:
            at = start
            for part in parts:
                # Unlike a memoryview, numpy copies without Python's lock.
                self._bytes[at : at + len(part)] = np.frombuffer(part, np.uint8)
                at += aligned(len(part))
        return start

    def release(self, start: int) -> None:
        """Take memory back that the reader has dropped; raises SlabError for other memory."""
        with self._lock:
            end = self._taken.pop(start, None)
            if end is None:
                raise SlabError(f"nothing was written at {start}")
            self._free = _joined(sorted([*self._free, (start, end)]))

    def _take(self, count: int) -> int | None:
        size = -(-count // _PAGE) * _PAGE
        with self._lock:
            # The first that is large enough: its pages were used most likely, and are there.
            for index, (start, end) in enumerate(self._free):
                if end - start >= size:
                    left = [(start + size, end)] if end - start > size else []
                    self._free[index : index + 1] = left
                    self._taken[start] = start + size
                    return start
        return None


def _joined(extents: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in extents:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


class _Mapped(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """All memory of a slab.

    A type of its own: numpy has a view of a view keep the first array alone where that is of the
    view's type, and would leave out the chunk between them.
    """


class _Chunk(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Memory of one message; arrays that are views of it keep it."""


class SlabReader:
    """Views the other side's data in a slab, and tracks released views."""

    def __init__(self, descriptor: int, *, writable: bool) -> None:
        """Map a slab; the descriptor may be closed then."""
        size = os.fstat(descriptor).st_size
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        mapped = mmap.mmap(descriptor, size, access=access)
        self._bytes = np.frombuffer(mapped, np.uint8).view(_Mapped)
        self._dropped: deque[int] = deque()

    def view(self, start: int, count: int) -> memoryview:
        """Return what was written at a place; raises SlabError for what lies elsewhere.

        Once neither it nor any array of it is left, its place is among `dropped`.
        """
        if not 0 <= start <= start + count <= len(self._bytes):
            raise SlabError(f"{count} bytes at {start} are not in {len(self._bytes)}")
        chunk = self._bytes[start : start + count].view(_Chunk)
        # In whatever thread the last of them goes: it only notes the place.
        weakref.finalize(chunk, self._dropped.append, start).atexit = False
        return chunk.data

    def dropped(self) -> list[int]:
        """Return the places that were dropped since this was asked last."""
        found = []
        while self._dropped:
            found.append(self._dropped.popleft())
        return found
