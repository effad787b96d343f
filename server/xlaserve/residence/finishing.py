"""Background compilation after a load, while the model answers already."""

import asyncio
import threading
import time
from collections import Counter
from functools import partial
from weakref import WeakKeyDictionary

import structlog

from xlaserve.concurrency.limited import Beat, LimitedCall, Overdue
from xlaserve.concurrency.workers import Workers
from xlaserve.errors import LoadCancelled, OutOfMemory, XlaserveError
from xlaserve.residence.capacity import Capacity, Sizes
from xlaserve.residence.registry import Instance, Version
from xlaserve.runtime.loaded import LoadedModel, Stage

PAUSE_SECONDS = 0.02
"""Between two steps: tracing holds Python's lock, and requests want it too."""


class NoMemoryNow(LoadCancelled):
    """The next bucket needs memory that is in use now and may become free."""


class Finisher:
    """Compiles the remaining batch sizes of ready models, one model at a time.

    It waits while models are loading: a first answer comes first. The memory of a bucket is
    reserved before it is compiled; without it the model serves with the buckets that it has until
    others release memory.
    """

    def __init__(self, workers: Workers, capacity: Capacity, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        """Time limit of one bucket, in seconds."""
        self._of: WeakKeyDictionary[Instance, asyncio.Task[None]] = WeakKeyDictionary()
        self._compiling: WeakKeyDictionary[Instance, LimitedCall[None]] = WeakKeyDictionary()
        self._workers = workers
        self._capacity = capacity
        self._short: set[asyncio.Task[None]] = set()
        """Tasks waiting for memory."""
        self._loads = 0
        self._stopping = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("loading")

    def load_begins(self) -> None:
        """Hold still until as many loads have ended as have begun."""
        self._loads += 1

    def load_ends(self) -> None:
        """Continue after the last running load."""
        self._loads -= 1

    def finish(self, version: Version, instance: Instance, model: LoadedModel) -> None:
        """Compile the rest of an instance in the background, and reserve its memory."""
        task = asyncio.ensure_future(self._finish(version, instance, model))
        self._tasks.add(task)
        self._of[instance] = task
        task.add_done_callback(self._tasks.discard)

    async def left(self, instance: Instance) -> None:
        """Return once no thread compiles for an instance that was unloaded, or it is stuck.

        A compilation that waits for the one thread is cancelled: the thread may wait for a load,
        and that load for the memory of this instance.
        """
        task = self._of.pop(instance, None)
        if task is not None:
            compiling = self._compiling.pop(instance, None)
            if task in self._short or (compiling is not None and compiling.cancel()):
                task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        """End as soon as the step in progress has."""
        self._stopping.set()
        for task in self._short:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._stopping.clear()

    async def _finish(self, version: Version, instance: Instance, model: LoadedModel) -> None:
        loop, beat, stage = asyncio.get_running_loop(), Beat(), [Stage("compiling")]

        def before_bucket() -> None:
            self._pace(version, instance, beat)
            reserving = self._reserve_next(version, instance, model.next_bucket_bytes)
            asyncio.run_coroutine_threadsafe(reserving, loop).result()
            beat()

        def on_stage(of_bucket: Stage) -> None:
            stage[0] = of_bucket

        compile_rest = partial(model.compile_rest, before_bucket, on_stage)
        compiling = self._compiling[instance] = self._workers.finish(compile_rest, beat)
        try:
            await compiling.within(self._step_seconds)
        except Overdue:
            self._abandoned(instance, compiling, str(stage[0]))
            return
        except NoMemoryNow:
            await self._until_there_is_memory(version, instance, model)
            if version.instance is instance:
                self.finish(version, instance, model)
            return
        except LoadCancelled:
            return
        except XlaserveError as error:
            # It goes on with what is compiled.
            self._log.warning(
                "background compilation incomplete", model=version.model, reason=str(error)
            )
        if version.instance is not instance:
            return
        instance.correct()
        instance.renew()  # what pays may look different now
        self._log.info(
            "background compilation finished",
            model=version.model,
            version=version.number,
            compile_seconds=round(model.info.compile_seconds, 3),
            cached_programs=model.info.cached_programs,
            size_bytes=model.info.memory.total_bytes,
            buckets={b.rows: round(b.compile_seconds, 3) for b in model.info.buckets},
            split_batches={b.rows: b.split_rows for b in model.info.buckets if b.split_rows},
        )

    async def _reserve_next(self, version: Version, instance: Instance, added: Sizes) -> None:
        """Reserve current memory and the next bucket's maximum; raises NoMemoryNow."""
        if version.instance is not instance:
            raise LoadCancelled(version.model)
        instance.correct()
        try:
            instance.reservation.set(_sum(instance.held, added))
        except OutOfMemory as error:
            self._log.info("background compilation pending", model=version.model, reason=str(error))
            raise NoMemoryNow(version.model) from None

    async def _until_there_is_memory(
        self, version: Version, instance: Instance, model: LoadedModel
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._short.add(task)
        try:
            while version.instance is instance and instance.reservation.missing(
                _sum(instance.held, model.next_bucket_bytes)
            ):
                await self._capacity.changed()
        finally:
            self._short.discard(task)

    def _pace(self, version: Version, instance: Instance, beat: Beat) -> None:
        """Yield to requests and loads; runs in the compiling thread."""
        beat()
        time.sleep(PAUSE_SECONDS)
        while self._loads and not self._stopping.is_set() and version.instance is instance:
            beat()
            time.sleep(PAUSE_SECONDS)
        if self._stopping.is_set() or version.instance is not instance:
            raise LoadCancelled(version.model)

    def _abandoned(self, instance: Instance, compiling: LimitedCall[None], stage: str) -> None:
        """Go on with the compiled programs; the thread has no further use."""
        work = instance.abandon(compiling, f"{stage} in the background")
        self._workers.abandoned.add(compiling, work, lambda: None)


def _sum(held: Sizes, added: Sizes) -> Sizes:
    return dict(Counter(held) + Counter(added))
