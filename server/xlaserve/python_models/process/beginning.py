"""The first message to a model's process, which describes the model to load."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from xlaserve.runtime.host import PythonHost


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first message to a process, and the parts of the server that the process may use."""

    header: Mapping[str, Any]
    host: PythonHost
    owner: object
    seconds: float
    """Seconds that the process may be silent while it has requests; 0 for no limit."""
    check_cancelled: Callable[[], None]

    @property
    def model(self) -> str:
        """Return the name of the model."""
        return str(self.header["model"])
