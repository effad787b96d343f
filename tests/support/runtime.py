"""A server together with the mesh that drives it."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from support.held import Held, held
from support.mesh import Mesh
from xlaserve.app.server import Application
from xlaserve.residence.lifecycle import Lifecycle, State

_PROGRESS_SECONDS = 60


def endpoint_at(kind: str, folder: Path) -> str:
    """Return a free port for `port`, or a Unix socket in a folder for `unix`."""
    return "port:0" if kind == "port" else f"unix:{folder}/grpc.sock"


@dataclass(frozen=True)
class Runtime:
    """A server in the test's event loop, and a sidecar that usually knows it is ready."""

    application: Application
    url: str
    mesh: Mesh
    http: str = ""
    """Address of the HTTP server; empty if there is none."""

    def held(self) -> Held:
        """Count the memory and executables held by models."""
        return held(self.application)

    async def until_in_use(
        self, requests: int = 1, *, unless: "asyncio.Future[str] | None" = None
    ) -> None:
        """Wait until `requests` inferences are in progress, or until `unless` is done."""
        async with asyncio.timeout(_PROGRESS_SECONDS):
            while self.application.registry.requests != requests:
                if unless is not None and unless.done():
                    return
                await asyncio.sleep(0)

    async def until_compiling(self, *models: str, step: int = 1) -> None:
        """Wait until one of these models is compiling its program number `step`.

        Pass all models that share programs: any one of them may compile the first. The test
        needs the fixture `compilations`; programs left by other tests would not be
        compiled.
        """
        async with asyncio.timeout(_PROGRESS_SECONDS):
            stage = f"compiling {step} of"
            while not any(self._stage(model).startswith(stage) for model in models):
                await asyncio.sleep(0)

    async def until_unloading(self, model: str) -> None:
        """Wait until the model is unloading; the unload must be a slow one."""
        async with asyncio.timeout(_PROGRESS_SECONDS):
            while [State.UNLOADING] != [found.state for found in self._lifecycles(model)]:
                await asyncio.sleep(0)

    def _stage(self, name: str) -> str:
        return next((found.reason for found in self._lifecycles(name)), "")

    def _lifecycles(self, name: str) -> list[Lifecycle]:
        model = self.application.registry.find(name)
        return [version.lifecycle for version in model.versions.values()] if model else []


StartRuntime = Callable[..., AbstractAsyncContextManager[Runtime]]
"""Runs a server and its mesh for the duration of a block; settings are keywords. With `asked=False`
the mesh has not asked for the status, as after a restart of the runtime.
"""
