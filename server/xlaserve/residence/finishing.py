"""Compiles remaining batch sizes in the background, after a model is ready."""

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
"""Pause between two steps in seconds: tracing holds the GIL, which requests need too."""


class NoMemoryNow(LoadCancelled):
    """The next bucket needs memory that is in use now but may be released later."""


class Finisher:
    """Compiles the remaining batch sizes of ready models, one model at a time.

    It pauses while models are loading, because their first answers matter more. The memory of a
    bucket is reserved before it is compiled; while there is not enough, the model serves with the
    buckets that it has.
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
        """Record that a load has begun; compilation pauses until `load_ends` is called."""
        self._loads += 1

    def load_ends(self) -> None:
        """Record that a load has ended; compilation resumes after the last one."""
        self._loads -= 1

    def finish(self, version: Version, instance: Instance, model: LoadedModel) -> None:
        """Compile an instance's remaining buckets in the background, reserving their memory."""
        task = asyncio.ensure_future(self._finish(version, instance, model))
        self._tasks.add(task)
        self._of[instance] = task
        task.add_done_callback(self._tasks.discard)

    async def left(self, instance: Instance) -> None:
        """Wait until no thread compiles for an unloaded instance, or its thread was abandoned.

        A compilation still queued for the only compiling thread is cancelled. Otherwise it could
        deadlock: the thread may wait for a load, and that load for the memory of this instance.
        """
        task = self._of.pop(instance, None)
        if task is not None:
            compiling = self._compiling.pop(instance, None)
            if task in self._short or (compiling is not None and compiling.cancel()):
                task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        """Stop all background compilation after the step in progress."""
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
            # The model continues with the programs compiled so far.
            self._log.warning(
                "background compilation incomplete", model=version.model, reason=str(error)
            )
        if version.instance is not instance:
            return
        instance.correct()
        instance.renew()  # the new programs may change which batch sizes are best
        self._log.info(
            "background compilation finished",
            model=version.model,
            version=version.number,
            compile_seconds=round(model.info.compile_seconds, 3),
            cached_programs=model.info.cached_programs,
            size_bytes=instance.memory.total_bytes,
            buckets={b.rows: round(b.compile_seconds, 3) for b in model.info.buckets},
            split_batches={b.rows: b.split_rows for b in model.info.buckets if b.split_rows},
        )

    async def _reserve_next(self, version: Version, instance: Instance, added: Sizes) -> None:
        """Reserve the current memory plus that of the next bucket, or raise NoMemoryNow."""
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
        """Yield to requests and loads; called in the compiling thread."""
        beat()
        time.sleep(PAUSE_SECONDS)
        while self._loads and not self._stopping.is_set() and version.instance is instance:
            beat()
            time.sleep(PAUSE_SECONDS)
        if self._stopping.is_set() or version.instance is not instance:
            raise LoadCancelled(version.model)

    def _abandoned(self, instance: Instance, compiling: LimitedCall[None], stage: str) -> None:
        """Abandon a thread that exceeded its time limit; the compiled programs stay in use."""
        work = instance.abandon(compiling, f"{stage} in the background")
        self._workers.abandoned.add(compiling, work, lambda: None)


def _sum(held: Sizes, added: Sizes) -> Sizes:
    return dict(Counter(held) + Counter(added))
