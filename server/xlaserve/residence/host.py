"""Limits for models derived from the host: memory, cores, and processes."""

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
"""Limit files of cgroup v2 and v1. Without a limit, v2 says `max` and v1 a huge number."""

_MOST_LOADS = 8
_MOST_COMPILING = 4
_COMPILING_BYTES = 4 << 30
"""Machine memory required per compile process; a process uses 300 MB before it compiles
anything."""
_LEAST_COMPILING_BYTES = 2 << 30


def memory_limit_bytes(cgroup_limits: tuple[Path, ...] = _CGROUP_LIMITS) -> int:
    """Return the cgroup's memory limit, or the machine's memory if there is none."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in cgroup_limits:
        with suppress(OSError, ValueError):
            return min(installed, int(path.read_text()))
    return installed


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def load_threads(settings: Settings) -> int:
    """Return how many models may load concurrently: the setting, or one per core, at most 8."""
    return settings.load_threads or min(_MOST_LOADS, cores())


def compile_processes(settings: Settings) -> int:
    """Return the number of compile processes: the setting, or a default by cores and memory."""
    if settings.compile_processes >= 0:
        return settings.compile_processes
    memory = settings.container_memory_bytes or memory_limit_bytes()
    if memory < _LEAST_COMPILING_BYTES:
        return 0
    return max(1, min(_MOST_COMPILING, cores() // 2, memory // _COMPILING_BYTES))


def capacity_bytes(
    settings: Settings, device_limit: int | None, sharing: int, platform: str = "cpu"
) -> int:
    """Return the model memory of a device: the setting, or device memory minus overhead.

    The overhead is at least the memory that models share on a device of this platform. CPU devices
    divide the host's memory; `sharing` is their number.
    """
    if settings.capacity_bytes:
        return settings.capacity_bytes
    if device_limit:
        return max(0, device_limit - max(settings.memory_overhead_bytes, device_bytes(platform)))
    granted = settings.container_memory_bytes or memory_limit_bytes()
    return max(0, granted - settings.memory_overhead_bytes) // sharing
