"""The memory of a server that is in a process of its own, or in several."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_RESET_PEAK = "5"
"""Written to clear_refs, it sets VmHWM back to what is resident now (proc(5))."""


@dataclass(frozen=True)
class Resident:
    """A process whose resident memory is watched, with its workers where it has some."""

    process: psutil.Process
    workers: Sequence[psutil.Process] = field(default=(), kw_only=True)

    @property
    def all(self) -> Sequence[psutil.Process]:
        """Return all processes of the server that serve."""
        return [self.process, *self.workers]

    def resident_bytes(self) -> int:
        """Return what it holds in memory now."""
        return sum(int(one.memory_info().rss) for one in self.all)

    def forget_peak(self) -> None:
        """Let the peak count from now."""
        for one in self.all:
            Path(f"/proc/{one.pid}/clear_refs").write_text(_RESET_PEAK)

    def peak_bytes(self) -> int:
        """Return the most it has held in memory, each process at its own time."""
        return sum(map(_peak_of, self.all))


def _peak_of(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10
