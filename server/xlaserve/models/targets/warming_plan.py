"""What a process that fills a compilation cache is told about it. Needs no JAX."""

from dataclasses import dataclass

import msgspec

from xlaserve.models.targets.compiling import COMMAND

_MODULE = "xlaserve.models.targets.warming"


@dataclass(frozen=True, slots=True)
class WarmingPlan:
    """Where programs go, and how the servers that use them compile."""

    cache_directory: str
    cache_max_bytes: int
    server_flags: str
    """Those of XLA that servers are started with, as `compilation.flags` has them."""
    command_buffers: bool = True
    latency_hiding: bool = True

    @property
    def command(self) -> tuple[str, ...]:
        """Return what starts the process."""
        return (*COMMAND[:-1], _MODULE, msgspec.json.encode(self).decode())
