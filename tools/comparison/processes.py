"""CPU time and memory of a process and its descendants, read from /proc."""

import os
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_KIB = 1024
_RESET_PEAK = "5"
"""Value for clear_refs that resets the peak to the current usage."""


def tree(pid: int) -> list[int]:
    """Return a process and all of its descendants."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its descendants."""
    total = 0
    for one in tree(pid):
        with suppress(OSError):
            fields = _stat(one)
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def busy_seconds() -> float:
    """Return the CPU time of all cores together since boot."""
    user, nice, system, _, _, irq, soft, *_ = map(
        int, (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / _TICKS


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its descendants."""
    return _sum(pid, "VmRSS")


def peak_bytes(pid: int) -> int:
    """Return the sum of each process's peak memory since the last reset."""
    return _sum(pid, "VmHWM")


def reset_peak(pid: int) -> None:
    """Reset the peaks to the current usage."""
    for one in tree(pid):
        with suppress(OSError):
            (_PROC / str(one) / "clear_refs").write_text(_RESET_PEAK)


def _stat(pid: int) -> list[str]:
    """Return the fields from the state on; the name before them may contain spaces and
    parentheses.
    """
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _sum(pid: int, field: str) -> int:
    total = 0
    for one in tree(pid):
        with suppress(OSError):
            for line in (_PROC / str(one) / "status").read_text().splitlines():
                if line.startswith(f"{field}:"):
                    total += int(line.split()[1]) * _KIB
    return total
