"""A complete server in the test's event loop."""

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
    """Address of the gRPC server."""
    http: str | None

    def gather(self, model: str, rows: int) -> None:
        """Make the model batch up to `rows` rows, regardless of its measured warm-up times."""
        _, instance = self.application.registry.resolve(model)
        runner: Any = instance.runner
        runner.batch_limit = rows
        (kind,) = (kind for kind in KINDS if kind.name == "batched on the host")
        instance.station = kind.make(Candidate(self.application.stations, instance, None))


Serve = Callable[..., AbstractAsyncContextManager[RunningServer]]
"""Runs a server on a repository for the duration of a block; settings are keywords."""


@asynccontextmanager
async def serving(scratch: Path, repository: Path, **settings: Any) -> AsyncIterator[RunningServer]:
    """Run a server on a repository for the duration of a block; settings are keywords."""
    defaults: dict[str, Any] = {
        "grpc_endpoint": "port:0",
        "http_endpoint": "none",
        "model_control_mode": ModelControlMode.EXPLICIT,
        "scratch_directory": scratch,
        "device": "cpu",
        "background_compile": False,
        "compilation_cache_directory": "none",
        "http2_engine": ENGINE,
        # For most tests, compiling takes less time than starting a process.
        "compile_processes": 0,
        "load_threads": 1,
    }
    application = Application(Settings.read({}, repository=repository, **defaults | settings))
    async with application.running() as addresses:
        await application.load()
        yield RunningServer(application, addresses.grpc, addresses.http)
