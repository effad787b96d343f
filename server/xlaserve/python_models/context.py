"""The server, as a copy of a Python model sees it."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from xlaserve.runtime.calls import Array, Arrays, Asked, current_request
from xlaserve.runtime.host import PythonHost
from xlaserve.runtime.metrics import Described, Metric


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """A model copy's access to the server."""

    model: str
    version: str
    directory: Path
    """The version directory, which holds model.py."""
    replica: int = 0
    """Index of the copy, below the count of its instance group."""
    parameters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Entries of `parameters` of the configuration."""
    host: PythonHost | None = field(default=None, repr=False)
    """The server itself; not for authors."""
    owner: object = field(default=None, repr=False)
    """Owner of its metrics; not for authors."""

    async def infer(
        self, model: str, inputs: Arrays, *, version: str = "", outputs: Sequence[str] = ()
    ) -> dict[str, Array]:
        """Return the outputs of another model, as part of the request that is computed.

        Raises the errors that every client meets: let them pass.
        """
        asked = Asked(model, inputs, version, outputs)
        found = await asyncio.wrap_future(self._host.calls.infer(asked, current_request()))
        return dict(found)

    def infer_and_wait(
        self, model: str, inputs: Arrays, *, version: str = "", outputs: Sequence[str] = ()
    ) -> dict[str, Array]:
        """Like `infer`, for code without coroutines. Blocks."""
        asked = Asked(model, inputs, version, outputs)
        return dict(self._host.calls.infer(asked, current_request()).result())

    def stream(
        self, model: str, inputs: Arrays, *, version: str = "", outputs: Sequence[str] = ()
    ) -> Iterator[Arrays]:
        """Yield the answers of a model that gives many, as they come. Blocks."""
        replies = self._host.calls.stream(Asked(model, inputs, version, outputs), current_request())
        try:
            yield from replies
        finally:
            replies.cancel()

    def counter(self, name: str, help: str = "", **labels: str) -> Metric:
        """Return a counter of `GET /metrics`, with these labels, the model and the version."""
        return self._metric("counter", name, help, labels)

    def gauge(self, name: str, help: str = "", **labels: str) -> Metric:
        """Return a gauge of `GET /metrics`, labelled as a counter is."""
        return self._metric("gauge", name, help, labels)

    def _metric(self, kind: str, name: str, help: str, labels: Mapping[str, str]) -> Metric:
        own = {**labels, "model": self.model, "version": self.version}
        return self._host.metrics.metric(self.owner, Described(name, kind, help), own)

    @property
    def _host(self) -> PythonHost:
        if self.host is None:
            raise RuntimeError("this model is not in a server")
        return self.host
