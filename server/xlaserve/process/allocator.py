"""The C library's allocator: how much freed memory it keeps."""

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
"""Allocations from this size on are mapped separately, and returned to the system when freed. glibc
would raise this threshold to 32 MiB as blocks are freed, and then keep large blocks per thread: 100
outputs of 10 MiB left 150 MiB behind. Smaller blocks, the majority, are reused, since a fresh
mapping costs a page fault per page.

By itself glibc raises this to 32 MiB with what is freed, and then keeps the large blocks of each
thread: 100 outputs of 10 MiB left 150 MiB behind. To map is to touch each page for the first time,
which is why smaller blocks, that are most, are kept.
"""
KEPT_BYTES = 12 << 20
"""Free memory kept at the end of each arena: a trim releases only the first one's."""
_LEAST_ARENAS = 2
"""One arena per core, instead of eight: no more threads allocate at the same time, and each arena
retains memory.
"""
_SETTINGS = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
)
"""Environment variables with which an operator overrides these choices."""
_STATM = Path("/proc/self/statm")

_log = structlog.get_logger("memory")


def arenas() -> int:
    """Return the limit of arenas."""
    return max(_LEAST_ARENAS, os.cpu_count() or 1)


def give_back_large_blocks(
    environment: Mapping[str, str] = os.environ, *, kept_bytes: int = 0
) -> bool:
    """Make glibc return large blocks when freed; tell whether that is in effect.

    With `kept_bytes` blocks below that size are kept for the next ones until a trim, in one arena:
    those of other threads hold no block of more than 32 MiB, and would map it again each time.

    To be called before there are threads. Not where the environment says otherwise, or the C
    library is not glibc, or a version of it (before 2.35) that keeps no blocks of that size.
    """
    given = [name for name in _SETTINGS if name in environment]
    if given:
        _log.info("the allocator is left as it is", variables=given)
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
        _log.warning("the allocator refuses its settings", kept_bytes=kept_bytes)
    return False


def trim() -> None:
    """Give all free pages back to the system. Blocks, for some milliseconds per 100 MB."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int | None:
    """Return the process's resident memory; None if unknown."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def freeze_heap() -> None:
    """Collect garbage, then exempt all present objects from later collections.

    Every unload collects: without what jax and the libraries hold, that takes microseconds instead
    of a tenth of a second.
    """
    gc.collect()
    gc.freeze()
