"""The interface of models that compute answers to several requests in one execution."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from xlaserve.runtime.loaded import Answer, Generating


@runtime_checkable
class Stepping(Generating, Protocol):
    """A Generating model that can compute the next answers of several requests together."""

    @property
    def most_together(self) -> int:
        """Return the most requests per step."""
        ...

    def advance(self, rows: Sequence[Any], /) -> Sequence[Answer | Exception]:
        """Compute the next answer of each request on one replica. Called in a thread.

        `rows` are what `generate` returned, of requests that all have answers, or all have none. An
        Exception is of one request alone; what is raised is of all of them.
        """
        ...
