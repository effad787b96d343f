"""How much memory this process may take, as far as the host says."""

import os
from contextlib import suppress
from pathlib import Path

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Of cgroup version 2 and 1; without a limit they say `max`, or a number beyond all memory."""


def memory_limit_bytes(cgroup_limits: tuple[Path, ...] = _CGROUP_LIMITS) -> int:
    """Return the limit of the cgroup, or all memory of the machine where there is none."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in cgroup_limits:
        with suppress(OSError, ValueError):
            return min(installed, int(path.read_text()))
    return installed
