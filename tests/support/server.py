"""A whole server in the loop of a test."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from xlaserve.app import Application


@dataclass(frozen=True)
class RunningServer:
    """A server on a free loopback port."""

    application: Application
    url: str
    """Where gRPC is served."""
    http: str | None

    def gather(self, model: str, rows: int) -> None:
        """Have so many rows of a model gathered, whatever its warm-up made of a busy machine."""
        _, instance = self.application.registry.resolve(model)
        runner: Any = instance.runner
        runner.batch_limit = rows
        instance.batches = True


Serve = Callable[..., AbstractAsyncContextManager[RunningServer]]
"""Runs a server on a repository for the length of a block; settings by keyword."""
