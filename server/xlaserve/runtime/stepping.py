"""The interface of models that step several requests in one execution."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from xlaserve.runtime.loaded import Answer, Generating


@runtime_checkable
class Stepping(Generating, Protocol):
    """A Generating model that can compute the next answers of several requests together."""

    @property
    def most_together(self) -> int:
        """Return the maximum number of requests per step."""
        ...

    def advance(self, rows: Sequence[Any], /) -> Sequence[Answer | Exception]:
        """Compute the next answer of each request on one replica. Called on a worker thread.

        `rows` are results of `generate`: either all have already given an answer, or none has. An
        Exception in the result applies to its request alone; a raised one to all requests.
        """
        ...
