"""A Python model in memory (a LoadedModel, Handling)."""

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
    """The copies of one version of a Python model."""

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
        """`forget` is called once its last execution has ended."""
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
        """Return the maximum of rows per execution, if requests may be batched."""
        return self.info.max_batch_size if self.is_batched else 1

    def handle(
        self,
        replica: int,
        requests: Sequence[ModelRequest],
        freed: Callable[[], None],
        *,
        together: bool = True,
    ) -> None:
        """Hand requests to a copy, and return at once."""
        self._copies[replica].handle(requests, freed, together=together)

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        """Have a copy answer a request of the server itself: of a warm-up, for instance. Blocks."""
        waiting = Waiting(self._name, self.info, inputs)
        self._copies[replica].handle([waiting.request], waiting.freed)
        return waiting.result()

    def ask_ready(self) -> "Sequence[Future[bool]]":
        """Return the pending answers of its copies' `is_ready`; empty without that method."""
        return ask_all(self._copies)

    def expected_seconds(self, rows: int) -> float:
        """Return infinity: nothing was measured."""
        return math.inf

    def close(self) -> None:
        """Have the code clean up, and forget its modules."""
        for copy in self._copies:
            copy.close()
        self._forget()


def close_all(copies: Sequence[Copy], forget: Callable[[], None]) -> None:
    """Close what a load that failed had made."""
    for copy in copies:
        try:
            copy.close()
        except Exception:
            structlog.get_logger("python").exception("a copy could not be closed")
    forget()
