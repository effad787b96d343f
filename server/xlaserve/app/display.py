"""Interface for showing the progress of startup to an operator."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from xlaserve.residence.catalog import IndexEntry
from xlaserve.runtime.loaded import Stage


@dataclass(frozen=True, slots=True)
class Addresses:
    """The server's addresses for clients."""

    grpc: str
    """`none` if gRPC is not served."""
    http: str | None
    grpc_data: str
    """Address of the inference endpoint; equal to `grpc` unless there is a separate one."""
    metrics: str | None = None
    """Address of the metrics endpoint; None if there is no separate one."""


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model version, for display."""

    entry: IndexEntry
    size_bytes: int | None
    """Memory of the model version in bytes; None if it is not loaded."""
    compile_seconds: float | None


class Display(Protocol):
    """Shows the progress of startup; all methods are called on the event loop."""

    def listening(self, addresses: Addresses) -> None:
        """Called when the ports are open."""

    def stage(self, model: str, version: str, stage: Stage) -> None:
        """Called when a load reaches another stage."""

    def started(self, rows: Sequence[ModelRow]) -> None:
        """Called when all loads at startup have ended."""


class NoDisplay:
    """A display that shows nothing, for servers that only log."""

    def listening(self, addresses: Addresses) -> None:
        """Show nothing."""

    def stage(self, model: str, version: str, stage: Stage) -> None:
        """Show nothing."""

    def started(self, rows: Sequence[ModelRow]) -> None:
        """Show nothing."""
