"""A server with the mesh that drives it."""

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
    """Return a free port for `port`, and a unix socket in a folder for `unix`."""
    return "port:0" if kind == "port" else f"unix:{folder}/grpc.sock"


@dataclass(frozen=True)
class Runtime:
    """A server in the loop of a test, and a sidecar, which as a rule has heard that it is ready."""

    application: Application
    url: str
    mesh: Mesh
    http: str = ""
    """Where HTTP is served; empty for nowhere."""

    def held(self) -> Held:
        """Count what models hold."""
        return held(self.application)

    async def until_in_use(
        self, requests: int = 1, *, unless: "asyncio.Future[str] | None" = None
    ) -> None:
        """Wait until so many inference requests are in progress, unless one of them has ended."""
        async with asyncio.timeout(_PROGRESS_SECONDS):
            while self.application.registry.requests != requests:
                if unless is not None and unless.done():
                    return
                await asyncio.sleep(0)

    async def until_compiling(self, *models: str, step: int = 1) -> None:
        """Wait until the load of one of these models has come to the compiler, so many times.

        Of models that share their programs each may leave the first one to another.
        The test has the fixture `compilations`: programs that other tests have left are never
        seen to be compiled.
        """
        async with asyncio.timeout(_PROGRESS_SECONDS):
            stage = f"compiling {step} of"
            while not any(self._stage(model).startswith(stage) for model in models):
                await asyncio.sleep(0)

    async def until_unloading(self, model: str) -> None:
        """Wait until an unload has come, which is to take a while."""
        async with asyncio.timeout(_PROGRESS_SECONDS):
            while [State.UNLOADING] != [found.state for found in self._lifecycles(model)]:
                await asyncio.sleep(0)

    def _stage(self, name: str) -> str:
        return next((found.reason for found in self._lifecycles(name)), "")

    def _lifecycles(self, name: str) -> list[Lifecycle]:
        model = self.application.registry.find(name)
        return [version.lifecycle for version in model.versions.values()] if model else []


StartRuntime = Callable[..., AbstractAsyncContextManager[Runtime]]
"""Runs a server and its mesh for the length of a block; settings by keyword. With `asked=False`
the mesh has not asked for the status: so it is with a runtime that was restarted under it."""
