"""The memory of a server that is in a process of its own."""

from dataclasses import dataclass
from pathlib import Path

import psutil

_RESET_PEAK = "5"
"""Written to clear_refs, it sets VmHWM back to what is resident now (proc(5))."""


@dataclass(frozen=True)
class Resident:
    """A process whose resident memory is watched."""

    process: psutil.Process

    def resident_bytes(self) -> int:
        """Return what it holds in memory now."""
        return int(self.process.memory_info().rss)

    def forget_peak(self) -> None:
        """Let the peak count from now."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text(_RESET_PEAK)

    def peak_bytes(self) -> int:
        """Return the most it has held in memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) << 10
