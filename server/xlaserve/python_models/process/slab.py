"""Shared memory with a model's process: one side writes tensors, the other reads them.

It is a memfd: it has no file name to clean up, and the kernel frees it when the last process that
maps it ends. Its size is sealed, because truncating it would kill the other process with SIGBUS.
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
"""Tensors of messages smaller than this are sent through the pipe, which is equally fast."""

_PAGE = mmap.PAGESIZE


class SlabError(Exception):
    """The peer named an invalid memory range."""


def aligned(count: int) -> int:
    """Round a size up, so that the next tensor has the alignment that XLA needs for zero-copy."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def make_slab(size: int) -> int:
    """Create a slab and return its descriptor, or -1 if `size` is 0 or the OS is not Linux."""
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
        """Map a slab; the caller may close the descriptor afterwards."""
        size = os.fstat(descriptor).st_size
        self._bytes = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        self._lock = threading.Lock()
        """Guards `_free` and `_allocated`."""
        self._free: list[tuple[int, int]] = [(0, size)]
        """Start and end of each free extent, sorted and not adjacent."""
        self._allocated: dict[int, int] = {}
        """End of each allocated extent, by its start."""

    def write(self, parts: Sequence[bytes | memoryview]) -> int | None:
        """Copy tensors into newly allocated memory; return its offset, or None if the slab is full.

        The memory is reserved until `release`.
        """
        start = self._take(sum(aligned(len(part)) for part in parts))
        if start is not None:
            at = start
            for part in parts:
                # Unlike assignment to a memoryview, numpy's copy releases the GIL.
                self._bytes[at : at + len(part)] = np.frombuffer(part, np.uint8)
                at += aligned(len(part))
        return start

    def release(self, start: int) -> None:
        """Free memory that the reader no longer uses; raises SlabError for an invalid offset."""
        with self._lock:
            end = self._allocated.pop(start, None)
            if end is None:
                raise SlabError(f"no data was written at offset {start}")
            self._free = _joined(sorted([*self._free, (start, end)]))

    def _take(self, count: int) -> int | None:
        size = -(-count // _PAGE) * _PAGE
        with self._lock:
            # First fit: low extents were most likely used before, so their pages are mapped.
            for index, (start, end) in enumerate(self._free):
                if end - start >= size:
                    left = [(start + size, end)] if end - start > size else []
                    self._free[index : index + 1] = left
                    self._allocated[start] = start + size
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
    """The whole slab as an array.

    It needs its own type: when a view has the same type as its base, numpy makes the view refer to
    the base's base, and the _Chunk in between would be freed too early.
    """


class _Chunk(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """The memory of one message; arrays that view it keep it alive."""


class SlabReader:
    """Returns views of data that the other side wrote, and tracks which views have been freed."""

    def __init__(self, descriptor: int, *, writable: bool) -> None:
        """Map a slab; the caller may close the descriptor afterwards."""
        size = os.fstat(descriptor).st_size
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        mapped = mmap.mmap(descriptor, size, access=access)
        self._bytes = np.frombuffer(mapped, np.uint8).view(_Mapped)
        self._dropped: deque[int] = deque()

    def view(self, start: int, count: int) -> memoryview:
        """Return a view of written data; raises SlabError if the range is outside the slab.

        When the view and all arrays based on it are freed, `dropped` returns `start`.
        """
        if not 0 <= start <= start + count <= len(self._bytes):
            raise SlabError(
                f"{count} bytes at offset {start} exceed the {len(self._bytes)} bytes of the slab"
            )
        chunk = self._bytes[start : start + count].view(_Chunk)
        # This may run in any thread, so it only records the offset.
        weakref.finalize(chunk, self._dropped.append, start).atexit = False
        return chunk.data

    def dropped(self) -> list[int]:
        """Return the offsets of views freed since the last call."""
        found = []
        while self._dropped:
            found.append(self._dropped.popleft())
        return found
