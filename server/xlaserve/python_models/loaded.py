"""A loaded Python model (a LoadedModel that is Handling)."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import structlog

from xlaserve.python_models.copies import Copy
from xlaserve.python_models.readiness import ask_all
from xlaserve.runtime.handling import ModelRequest
from xlaserve.runtime.loaded import ModelInfo, Value
from xlaserve.runtime.uncompiled import UncompiledModel
from xlaserve.runtime.waiting import Waiting

PLATFORM = "python"


class LoadedPython(UncompiledModel):
    """The replicas of one version of a Python model."""

    def __init__(
        self,
        name: str,
        info: ModelInfo,
        copies: Sequence[Copy],
        *,
        is_batched: bool,
        concurrency: int,
        forget: Callable[[], None],
    ) -> None:
        """`forget` is called after all replicas are closed."""
        self._name = name
        self.info = info
        self.replicas = len(copies)
        self.is_batched = is_batched
        self.is_decoupled = info.is_decoupled
        self.concurrency = concurrency
        self._copies = copies
        self._forget = forget

    @property
    def batch_limit(self) -> int:
        """Return the maximum number of rows per execution: 1 if requests are not batched."""
        return self.info.max_batch_size if self.is_batched else 1

    def handle(
        self,
        replica: int,
        requests: Sequence[ModelRequest],
        freed: Callable[[], None],
        *,
        together: bool = True,
    ) -> None:
        """Pass requests to a replica; returns immediately."""
        self._copies[replica].handle(requests, freed, together=together)

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        """Execute a request of the server's own, such as a warm-up, on a replica. Blocks."""
        waiting = Waiting(self._name, self.info, inputs)
        self._copies[replica].handle([waiting.request], waiting.freed)
        return waiting.result()

    def ask_ready(self) -> "Sequence[Future[bool]]":
        """Return the pending `is_ready` results of the replicas that define the method."""
        return ask_all(self._copies)

    def expected_seconds(self, rows: int) -> float:
        """Return infinity: execution times are not measured."""
        return math.inf

    def close(self) -> None:
        """Unload every replica, then remove the model's modules and metrics."""
        for copy in self._copies:
            copy.close()
        self._forget()


def close_all(copies: Sequence[Copy], forget: Callable[[], None]) -> None:
    """Close the replicas that a failed load has created."""
    for copy in copies:
        try:
            copy.close()
        except Exception:
            structlog.get_logger("python").exception("model instance not closed")
    forget()
