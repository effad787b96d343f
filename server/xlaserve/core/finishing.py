"""What loads leave to be compiled while their models answer already."""

import asyncio
import threading
import time
from functools import partial

import structlog

from xlaserve.core.ensemble import EnsemblePlan
from xlaserve.core.registry import Instance, Version
from xlaserve.core.workers import Workers
from xlaserve.errors import LoadCancelled, XlaserveError
from xlaserve.models.loaded import LoadedModel

PAUSE_SECONDS = 0.02
"""Between two steps: tracing holds Python's lock, and requests want it too."""


class Finisher:
    """Compiles, one model after the other, what was not needed for the first answer.

    It waits while models are loaded: who waits for a first answer goes before who has one.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._loads = 0
        self._stopping = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("loading")

    def load_begins(self) -> None:
        """Hold still until as many loads have ended as have begun."""
        self._loads += 1

    def load_ends(self) -> None:
        """Go on, if it was the last."""
        self._loads -= 1

    def finish(self, version: Version, instance: Instance) -> None:
        """Begin to compile the rest of an instance, and book what it takes behind that."""
        if isinstance(instance.runner, EnsemblePlan):
            return
        task = asyncio.ensure_future(self._finish(version, instance, instance.runner))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End as soon as the step in progress has."""
        self._stopping.set()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._stopping.clear()

    async def _finish(self, version: Version, instance: Instance, model: LoadedModel) -> None:
        compiling = self._workers.finish(
            partial(model.compile_rest, partial(self._pace, version.model))
        )
        try:
            await asyncio.wrap_future(compiling)
        except LoadCancelled:
            return
        except XlaserveError as error:
            # It goes on with what is compiled.
            self._log.warning("not all was compiled", model=version.model, reason=str(error))
        if version.instance is not instance:
            return
        instance.reservation.correct(instance.held)
        instance.batches = None  # whether that pays may look different now
        self._log.info(
            "model complete",
            model=version.model,
            version=version.number,
            compile_seconds=round(model.info.compile_seconds, 3),
            size_bytes=model.info.memory.total_bytes,
            buckets={b.rows: round(b.compile_seconds, 3) for b in model.info.buckets},
        )

    def _pace(self, model: str) -> None:
        """Let others have their turn; runs in the thread that compiles."""
        time.sleep(PAUSE_SECONDS)
        while self._loads and not self._stopping.is_set():
            time.sleep(PAUSE_SECONDS)
        if self._stopping.is_set():
            raise LoadCancelled(model)
