"""Runs loaders in threads, with a time limit."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from xlaserve.concurrency.abandoned import Abandoned
from xlaserve.concurrency.limited import LimitedCall, Overdue
from xlaserve.concurrency.workers import Workers
from xlaserve.errors import LoadCancelled, LoadTimedOut
from xlaserve.residence.capacity import Reservation
from xlaserve.residence.lifecycle import State
from xlaserve.residence.registry import Registry, Version
from xlaserve.residence.repository.sources import VersionSource
from xlaserve.runtime.devices.placement import Devices
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel, Stage

Load: TypeAlias = Callable[[Path, LoadContext], LoadedModel]
"""Loads a model from a version directory; blocks."""

StageObserver: TypeAlias = Callable[[str, str, Stage], None]
"""Called with model, version and stage of a running load, on the event loop."""


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Time limits of loads."""

    load_seconds: float
    """Time limit of one load, from when its thread starts."""
    cancel_seconds: float
    """Limit for a cancelled load to end, from the cancellation."""


@dataclass(frozen=True, slots=True)
class Loading:
    """One load: its source and its reservation."""

    version: Version
    source: VersionSource
    reservation: Reservation
    context: LoadContext
    """The load's context without callbacks for stages and cancellation, which the runner adds."""


class LoadRunner:
    """Runs loaders in threads, and abandons threads that exceed the time limit."""

    def __init__(
        self,
        registry: Registry,
        workers: Workers,
        limits: LoadLimits,
        *,
        load: Load,
        devices: Callable[[], Devices],
        on_stage: StageObserver,
        release: Callable[[], Awaitable[None]],
    ) -> None:
        self._registry = registry
        self._workers = workers
        self._limits = limits
        self._load = load
        self._devices = devices
        self._on_stage = on_stage
        self._release = release
        self._discarding: set[asyncio.Task[None]] = set()

    async def run(self, loading: Loading) -> LoadedModel:
        """Load a model in a thread. Raises the loader's exceptions, or LoadTimedOut.

        When this returns, a cancelled load has ended or was abandoned. An abandoned load keeps its
        reservation until its thread ends.
        """
        run = _Run(loading)
        now = partial(self._load_now, run, asyncio.get_running_loop())
        call = run.call = self._workers.load(now)
        try:
            return await call.within(self._limits.load_seconds)
        except Overdue:
            run.cancelled.set()
            self._abandoned(run)
            seconds = self._limits.load_seconds
            raise LoadTimedOut(loading.version.model, str(run.stage), seconds) from None
        except asyncio.CancelledError:
            run.cancelled.set()
            if not call.cancel() and not self._workers.closed:
                # A second cancellation must not interrupt the cleanup.
                discarding = asyncio.ensure_future(self._discard(run))
                self._discarding.add(discarding)
                discarding.add_done_callback(self._discarding.discard)
                await asyncio.shield(discarding)
            raise

    async def _discard(self, run: "_Run") -> None:
        """Wait until a cancelled load has released its memory, or abandon it."""
        assert run.call is not None
        run.call.beat()
        try:
            model = await run.call.within(self._limits.cancel_seconds)
        except Overdue:
            self._abandoned(run)
            return
        except Exception:  # the load was cancelled: nobody needs the error
            await self._release()
            return
        await self._workers.wait(model.close)
        await self._release()

    def _abandoned(self, run: "_Run") -> None:
        assert run.call is not None
        loading, call = run.loading, run.call
        kept = loading.reservation.handed_over()
        work = Abandoned(
            loading.version.model,
            loading.source.fingerprint,
            str(run.stage),
            sum(kept.sizes.values()),
        )

        def ended() -> None:
            freeing = asyncio.ensure_future(self._free(call, kept))
            self._discarding.add(freeing)
            freeing.add_done_callback(self._discarding.discard)

        self._workers.abandoned.add(call, work, ended)

    async def _free(self, call: LimitedCall[LoadedModel], kept: Reservation) -> None:
        if call.future.exception() is None:
            await self._workers.wait(call.future.result().close)
        await self._release()
        kept.release()

    def _show_stage(self, version: Version, stage: Stage) -> None:
        """Show the stage of a load that is still in progress."""
        if version.state in (State.LOADING, State.RELOADING):
            self._registry.note(version, str(stage))
            self._on_stage(version.model, version.number, stage)

    def _load_now(self, run: "_Run", loop: asyncio.AbstractEventLoop) -> LoadedModel:
        """Run the loader; called in a thread."""
        loading = run.loading
        version = loading.version

        def on_stage(stage: Stage) -> None:
            run.stage = stage
            if not run.cancelled.is_set():
                loop.call_soon_threadsafe(self._show_stage, version, stage)

        run.check_cancelled()
        context = replace(
            loading.context,
            device=self._devices().platform,
            on_stage=on_stage,
            check_cancelled=run.check_cancelled,
        )
        loading.source.verify(context.config, run.check_cancelled)
        return self._load(loading.source.directory, context)


class _Run:
    """One load in its thread."""

    def __init__(self, loading: Loading) -> None:
        self.loading = loading
        self.cancelled = threading.Event()
        self.stage = Stage("starting")
        """The last reported stage; set in the loader's thread."""
        self.call: LimitedCall[LoadedModel] | None = None

    def check_cancelled(self) -> None:
        """Raise LoadCancelled once the load has been abandoned."""
        if self.cancelled.is_set():
            raise LoadCancelled(self.loading.version.model)
