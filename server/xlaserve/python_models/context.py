"""The server API that a replica of a Python model uses."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from xlaserve.runtime.calls import Array, Arrays, NestedRequest, current_request
from xlaserve.runtime.host import PythonHost
from xlaserve.runtime.metrics import Described, Metric


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Gives a replica of a model access to the server."""

    model: str
    version: str
    directory: Path
    """The version directory, which contains model.py."""
    replica: int = 0
    """Index of the replica, less than the count of its instance group."""
    parameters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The `parameters` of the model configuration."""
    host: PythonHost | None = field(default=None, repr=False)
    """The server's side of this API; not for model code."""
    owner: object = field(default=None, repr=False)
    """Key under which the server keeps the model's metrics; not for model code."""

    async def infer(
        self, model: str, inputs: Arrays, *, version: str = "", outputs: Sequence[str] = ()
    ) -> dict[str, Array]:
        """Call another model as part of the current request, and return its outputs.

        Raises the same errors that a client would get; let them propagate to answer the client.
        """
        request = NestedRequest(model, inputs, version, outputs)
        found = await asyncio.wrap_future(self._host.calls.infer(request, current_request()))
        return dict(found)

    def infer_and_wait(
        self, model: str, inputs: Arrays, *, version: str = "", outputs: Sequence[str] = ()
    ) -> dict[str, Array]:
        """Call another model and wait for its outputs, for code that is not async. Blocks."""
        request = NestedRequest(model, inputs, version, outputs)
        return dict(self._host.calls.infer(request, current_request()).result())

    def stream(
        self, model: str, inputs: Arrays, *, version: str = "", outputs: Sequence[str] = ()
    ) -> Iterator[Arrays]:
        """Yield the answers of a decoupled model as they arrive. Blocks."""
        replies = self._host.calls.stream(
            NestedRequest(model, inputs, version, outputs), current_request()
        )
        try:
            yield from replies
        finally:
            replies.cancel()

    def counter(self, name: str, help: str = "", **labels: str) -> Metric:
        """Return a counter in `GET /metrics`; the labels `model` and `version` are added."""
        return self._metric("counter", name, help, labels)

    def gauge(self, name: str, help: str = "", **labels: str) -> Metric:
        """Return a gauge in `GET /metrics`; the labels `model` and `version` are added."""
        return self._metric("gauge", name, help, labels)

    def _metric(self, kind: str, name: str, help: str, labels: Mapping[str, str]) -> Metric:
        own = {**labels, "model": self.model, "version": self.version}
        return self._host.metrics.metric(self.owner, Described(name, kind, help), own)

    @property
    def _host(self) -> PythonHost:
        if self.host is None:
            raise RuntimeError("this model does not run in a server")
        return self.host
