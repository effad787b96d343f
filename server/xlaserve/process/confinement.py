"""Resource limits for a process that reads untrusted data: memory, processor time, files."""

import os
import re
import resource
import signal
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_DATA = re.compile(r"^VmData:\s+(\d+) kB", re.MULTILINE)
_BYTES_PER_CORE = 32 << 20
"""Allowance for stacks and arenas of the threads that XLA starts per core."""


def confine(memory_bytes: int, *, file_bytes: int, open_files: int) -> None:
    """Limit this process permanently; a `memory_bytes` of 0 leaves memory unlimited.

    `memory_bytes` is added to the memory already in use. Written files are limited to `file_bytes`,
    and core dumps are disabled. Limits that the system lacks have no effect.
    """
    most = data_bytes() + memory_bytes + _BYTES_PER_CORE * (os.cpu_count() or 1)
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, open_files),
    ]
    # Private writable memory, because XLA reserves much more address space than it uses.
    if memory_bytes and data_bytes():
        limits.append((resource.RLIMIT_DATA, most))
    for limit, value in limits:
        _lower(limit, value)


def limit_processor(seconds: float) -> None:
    """Let SIGXCPU end this process after `seconds` more of CPU time; 0 removes the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = resource.RLIM_INFINITY
    if seconds:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = max(1, round(used.ru_utime + used.ru_stime + seconds))
    if hard != resource.RLIM_INFINITY:
        soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def data_bytes() -> int:
    """Return the private writable memory of this process, or 0 if unknown."""
    with suppress(OSError):
        found = _DATA.search(_STATUS.read_text())
        return int(found[1]) << 10 if found else 0
    return 0


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(limit, (value, value))
