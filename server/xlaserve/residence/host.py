"""Memory limits for models, of a device or of the host."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from xlaserve.runtime.devices.workspace import device_bytes
from xlaserve.settings import Settings

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files of cgroup versions 2 and 1; without a limit they say `max`, or more than all memory."""

_MOST_LOADS = 8
_MOST_COMPILING = 4
_COMPILING_BYTES = 4 << 30
"""Memory of a machine for each of the processes: one of them has 300 MB before it compiles."""
_LEAST_COMPILING_BYTES = 2 << 30


def memory_limit_bytes(cgroup_limits: tuple[Path, ...] = _CGROUP_LIMITS) -> int:
    """Return the limit of the cgroup, or the machine's memory without one."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in cgroup_limits:
        with suppress(OSError, ValueError):
            return min(installed, int(path.read_text()))
    return installed


def cores() -> int:
    """Return the number of usable cores."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def load_threads(settings: Settings) -> int:
    """Return how many models are loaded at the same time: as set, else as many as cores."""
    return settings.load_threads or min(_MOST_LOADS, cores())


def compile_processes(settings: Settings) -> int:
    """Return how many processes compile: as set, else as cores and memory allow."""
    if settings.compile_processes >= 0:
        return settings.compile_processes
    memory = settings.container_memory_bytes or memory_limit_bytes()
    if memory < _LEAST_COMPILING_BYTES:
        return 0
    return max(1, min(_MOST_COMPILING, cores() // 2, memory // _COMPILING_BYTES))


def capacity_bytes(
    settings: Settings, device_limit: int | None, sharing: int, platform: str = "cpu"
) -> int:
    """Return the memory for models of one device: as set, else its own less the overhead.

    The overhead holds what models share on a device of the platform, and is as large at least.
    Devices of the CPU have no memory of their own, and share the host's.
    """
    if settings.capacity_bytes:
        return settings.capacity_bytes
    if device_limit:
        return max(0, device_limit - max(settings.memory_overhead_bytes, device_bytes(platform)))
    granted = settings.container_memory_bytes or memory_limit_bytes()
    return max(0, granted - settings.memory_overhead_bytes) // sharing
