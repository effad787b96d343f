"""The start of the server, as an operator is shown it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from xlaserve.residence.catalog import IndexEntry
from xlaserve.runtime.loaded import Stage


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the server for clients."""

    grpc: str
    """`none` where gRPC is not served."""
    http: str | None
    grpc_data: str
    """The same as `grpc` with a single endpoint."""
    metrics: str | None = None
    """None where metrics have no address of their own."""


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model version as the operator sees it."""

    entry: IndexEntry
    size_bytes: int | None
    """Bytes it holds in memory; None while it is not loaded."""
    compile_seconds: float | None


class Display(Protocol):
    """Shows the progress of the start; called on the event loop."""

    def listening(self, addresses: Addresses) -> None:
        """The ports are open."""

    def stage(self, model: str, version: str, stage: Stage) -> None:
        """A load has reached another stage."""

    def started(self, rows: Sequence[ModelRow]) -> None:
        """Every load of the start has ended."""


class NoDisplay:
    """Shows nothing: the log says it all."""

    def listening(self, addresses: Addresses) -> None:
        """Show nothing."""

    def stage(self, model: str, version: str, stage: Stage) -> None:
        """Show nothing."""

    def started(self, rows: Sequence[ModelRow]) -> None:
        """Show nothing."""
