"""A whole server in the loop of a test."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.engines import ENGINE
from xlaserve.app.server import Application
from xlaserve.serving.stations.table import KINDS, Candidate
from xlaserve.settings import Settings
from xlaserve.settings.choices import ModelControlMode


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
        (kind,) = (kind for kind in KINDS if kind.name == "batched on the host")
        instance.station = kind.make(Candidate(self.application.stations, instance, None))


Serve = Callable[..., AbstractAsyncContextManager[RunningServer]]
"""Runs a server on a repository for the length of a block; settings by keyword."""


@asynccontextmanager
async def serving(scratch: Path, repository: Path, **settings: Any) -> AsyncIterator[RunningServer]:
    """Run a server on a repository for the length of a block; settings by keyword."""
    defaults: dict[str, Any] = {
        "grpc_endpoint": "port:0",
        "http_endpoint": "none",
        "model_control_mode": ModelControlMode.EXPLICIT,
        "scratch_directory": scratch,
        "device": "cpu",
        "background_compile": False,
        "compilation_cache_directory": "none",
        "http2_engine": ENGINE,
        # Most tests compile what takes less than to start a process.
        "compile_processes": 0,
        "load_threads": 1,
    }
    application = Application(Settings.read({}, repository=repository, **defaults | settings))
    async with application.running() as addresses:
        await application.load()
        yield RunningServer(application, addresses.grpc, addresses.http)
