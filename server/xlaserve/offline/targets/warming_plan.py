"""The arguments of a cache warming process. Does not import JAX."""

from dataclasses import dataclass, field

import msgspec

from xlaserve.offline.targets.compiling import COMMAND
from xlaserve.runtime.programs.compilation import XlaOptions

_MODULE = "xlaserve.offline.targets.warming"


@dataclass(frozen=True, slots=True)
class WarmingPlan:
    """The cache to fill, and the compiler options of the servers that will use it."""

    cache_directory: str
    cache_max_bytes: int
    server_flags: str
    """XLA flags of the servers, in the form of `compilation.flags`."""
    options: XlaOptions = field(default_factory=XlaOptions)

    @property
    def command(self) -> tuple[str, ...]:
        """Return the command that starts the process."""
        return (*COMMAND[:-1], _MODULE, msgspec.json.encode(self).decode())
