"""Configures how much freed memory the C library's allocator keeps."""

import ctypes
import gc
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import structlog

# <malloc.h> of glibc
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_MAPPED_BYTES = 8 << 20
"""Allocations from this size on are mapped separately, and returned to the system when freed. By
default glibc raises this threshold to 32 MiB as blocks are freed, and then keeps large blocks per
thread: 100 outputs of 10 MiB left 150 MiB behind. Smaller blocks, the majority, are reused, since a
fresh mapping costs a page fault per page."""
KEPT_BYTES = 12 << 20
"""Free memory kept at the top of each arena, which `malloc_trim` releases only for the first one.
"""
_LEAST_ARENAS = 2
"""Minimum number of arenas. The limit is one per core instead of glibc's eight per core: no more
threads allocate concurrently, and each arena retains memory."""
_SETTINGS = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
)
"""Environment variables by which an operator configures the allocator instead."""
_STATM = Path("/proc/self/statm")

_log = structlog.get_logger("memory")


def arenas() -> int:
    """Return the maximum number of arenas."""
    return max(_LEAST_ARENAS, os.cpu_count() or 1)


def give_back_large_blocks(
    environment: Mapping[str, str] = os.environ, *, kept_bytes: int = 0
) -> bool:
    """Make glibc return large blocks when they are freed; return whether that is in effect.

    With `kept_bytes`, freed blocks below that size are kept for reuse until a trim. All threads
    then share the main arena: others cannot keep blocks above 32 MiB, which would be mapped anew.

    Call before any thread starts. Does nothing if the environment configures the allocator, if the
    C library is not glibc, or if its version (before 2.35) cannot keep blocks of that size.
    """
    given = [name for name in _SETTINGS if name in environment]
    if given:
        _log.info("allocator settings unchanged", variables=given)
        return False
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        values = {
            _MMAP_THRESHOLD: max(_MAPPED_BYTES, kept_bytes),
            _TRIM_THRESHOLD: max(KEPT_BYTES, kept_bytes),
            _ARENA_MAX: 1 if kept_bytes else arenas(),
        }
        if all(library.mallopt(*item) for item in values.items()):
            return True
        _log.warning("allocator settings refused", kept_bytes=kept_bytes)
    return False


def trim() -> None:
    """Return all free pages to the system. Blocks for some milliseconds per 100 MB."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int | None:
    """Return the resident memory of this process, or None if unknown."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def freeze_heap() -> None:
    """Collect garbage, then exempt all live objects from later collections.

    Every unload runs a collection. Without the objects of jax and other libraries it takes
    microseconds instead of a tenth of a second.
    """
    gc.collect()
    gc.freeze()
