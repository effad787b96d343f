"""Resident memory of a server with one or several processes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_RESET_PEAK = "5"
"""Written to clear_refs, it resets VmHWM to the current resident size (proc(5))."""


@dataclass(frozen=True)
class Resident:
    """A server process whose resident memory is measured, including its workers."""

    process: psutil.Process
    workers: Sequence[psutil.Process] = field(default=(), kw_only=True)

    @property
    def all(self) -> Sequence[psutil.Process]:
        """Return all serving processes."""
        return [self.process, *self.workers]

    def resident_bytes(self) -> int:
        """Return the current resident memory."""
        return sum(int(one.memory_info().rss) for one in self.all)

    def forget_peak(self) -> None:
        """Reset the peak."""
        for one in self.all:
            Path(f"/proc/{one.pid}/clear_refs").write_text(_RESET_PEAK)

    def peak_bytes(self) -> int:
        """Return the sum of the processes' peaks, which need not coincide in time."""
        return sum(map(_peak_of, self.all))


def _peak_of(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10
