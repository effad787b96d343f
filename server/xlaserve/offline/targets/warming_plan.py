"""The arguments of a process that fills a compilation cache. Needs no JAX."""

from dataclasses import dataclass, field

import msgspec

from xlaserve.offline.targets.compiling import COMMAND
from xlaserve.runtime.programs.compilation import XlaOptions

_MODULE = "xlaserve.offline.targets.warming"


@dataclass(frozen=True, slots=True)
class WarmingPlan:
    """The cache that programs go to, and how the servers that use it compile."""

    cache_directory: str
    cache_max_bytes: int
    server_flags: str
    """XLA flags of the servers, as from `compilation.flags`."""
    options: XlaOptions = field(default_factory=XlaOptions)

    @property
    def command(self) -> tuple[str, ...]:
        """Return the command that starts the process."""
        return (*COMMAND[:-1], _MODULE, msgspec.json.encode(self).decode())
