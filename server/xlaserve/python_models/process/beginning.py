"""The first message to a model's process, with everything its code is given."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from xlaserve.runtime.host import PythonHost


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first message to a process, and the server behind it."""

    said: Mapping[str, Any]
    host: PythonHost
    owner: object
    seconds: float
    """Limit of its silence while it has requests; 0 for none."""
    check_cancelled: Callable[[], None]

    @property
    def model(self) -> str:
        """Return the name of the model."""
        return str(self.said["model"])
