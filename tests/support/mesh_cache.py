"""The cache of a ModelMesh on one runtime: admits by predicted size, corrects by actual size.

It reproduces the observed behavior of the real cache with shorter delays. The actual size is known
after a load; the excess over the prediction is a deficit, for which other models are evicted.
Unloading models count until their unload has completed, and evict further models while they exceed
the share reserved for unloading. A load that fails on a full instance can thus empty it.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from support.mesh import Mesh, Outcome, lost, outcome

_UNLOAD_SECONDS = 0.02
"""Delay between removal from the cache and the unload call; really 0.2, or 1 after a failure."""
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Registered:
    """What the mesh knows about a registered model."""

    path: str
    """Path in load requests."""
    asked_path: str
    """Path in size predictions; with a puller, it is the path in storage."""


class _Entry:
    """A cached model."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.weight = 0
        self.is_loading = True
        self.loaded: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.began = time.time()
        """Seconds since the epoch."""
        self.stages: dict[str, float] = {}
        """Seconds per stage of its load."""
        self._passed = time.monotonic()

    def passed(self, stage: str) -> None:
        """Record the end of a stage of its load."""
        now = time.monotonic()
        self.stages[stage] = now - self._passed
        self._passed = now


@dataclass(frozen=True, slots=True)
class Trace:
    """Durations of the stages of a load."""

    model: str
    began: float
    """Seconds since the epoch."""
    stages: Mapping[str, float]
    """Seconds per stage, in order."""


class MeshCache:
    """An LRU cache that keeps models loaded while their believed sizes fit."""

    def __init__(self, mesh: Mesh, ready: Any, models: Mapping[str, Registered]) -> None:
        """`ready` is the runtime's status response when the mesh started."""
        threads: int = ready.maxLoadingConcurrency
        self._mesh = mesh
        self._models = models
        self._capacity: int = ready.capacityInBytes
        self._default: int = ready.defaultModelSizeInBytes
        kept = threads * self._default // (2 if threads <= 2 else 4)
        self._kept: int = min(max(kept, self._capacity // 100), self._capacity // 10)
        """Bytes reserved for models that are unloading."""
        self._loaders = asyncio.Semaphore(threads)
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """Cached models, least recently used first."""
        self._occupied: int = 0
        """Bytes of cached models."""
        self._unloading: int = 0
        """Bytes of removed models, minus those lent to loads and to the deficit."""
        self._deficit = 0
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        """Number of occurrences per event."""
        self.on_answer: Callable[[str, Any], None] = _ignore
        """Called with a model and its answer."""

    async def infer(self, model: str, request: Any) -> Outcome:
        """Load the model if necessary and forward the request; return the load's error if
        it fails.
        """
        answer: Outcome = ("UNAVAILABLE", "no tries are left")
        for _ in range(_TRIES):
            entry = self._entries.get(model) or self._admit(model)
            self._entries.move_to_end(model)
            loaded = await asyncio.shield(entry.loaded)
            if loaded[0] != "OK":
                return loaded
            call = self._mesh.infer(model, request)
            answer = await outcome(call)
            if answer[0] == "OK":
                self.on_answer(model, await call)
            if not lost(answer) and answer[0] != "UNAVAILABLE":
                return answer
            self._forget(entry)
        return answer

    def holds(self, model: str) -> bool:
        """Return whether a model is loaded."""
        entry = self._entries.get(model)
        return entry is not None and entry.loaded.done()

    def trace(self, model: str) -> Trace | None:
        """Return the load times of a cached model, or None if it is not cached."""
        entry = self._entries.get(model)
        return None if entry is None else Trace(model, entry.began, dict(entry.stages))

    async def settle(self) -> None:
        """Wait until no load or unload is in progress."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    # --- Admission -------------------------------------------------------------------------------

    def _admit(self, model: str) -> _Entry:
        entry = self._entries[model] = _Entry(model)
        self._start(self._load(entry))
        return entry

    async def _load(self, entry: _Entry) -> None:
        registered = self._models[entry.model]
        async with self._loaders:
            entry.passed("a loader of the mesh")
            predicting = self._mesh.predict(entry.model, registered.asked_path)
            status, _ = await outcome(predicting)
            predicted = (await predicting).sizeInBytes if status == "OK" else self._default
            entry.passed("its prediction")
            await self._claim(entry, predicted)
            entry.passed("unloads that make room")
            self.counts["loads"] += 1
            loading = self._mesh.load(entry.model, registered.path)
            loaded = await outcome(loading)
            entry.passed("its load")
            entry.is_loading = False
            if loaded[0] == "OK":
                self._learn(entry, (await loading).sizeInBytes)
            else:
                self._count_failure("loads", loaded[0])
                self._forget(entry)
        await self._notify()
        entry.loaded.set_result(loaded)

    async def _claim(self, entry: _Entry, size: int) -> None:
        """Reserve memory for a load, evicting other models, and wait until it is free."""
        entry.weight = size
        self._occupied += size
        self._unloading -= size
        self._evict()
        await self._until(lambda: self._is_free(size))
        self._unloading += size

    def _is_free(self, size: int) -> bool:
        unloading = self._unloading + size
        return unloading <= self._kept or unloading + self._occupied <= self._capacity

    def _learn(self, entry: _Entry, size: int) -> None:
        grown = size - entry.weight
        entry.weight = size
        if grown > 0:
            short = grown - (self._capacity - self._used)
            if short > 0:
                self.counts["over-allocations"] += 1
                self._unloading -= short
                self._deficit += short
            self._occupied += grown
            self._evict()
        else:
            self._occupied += grown
            self._unloading += self._pay(-grown)

    # --- Eviction --------------------------------------------------------------------------------

    @property
    def _used(self) -> int:
        return self._occupied + max(self._kept, self._unloading)

    def _evict(self) -> None:
        while self._used > self._capacity:
            idle = (entry for entry in self._entries.values() if not entry.is_loading)
            entry = next(idle, None)
            if entry is None:
                self.counts["emptied"] += 1
                return
            self.counts["evictions"] += 1
            self._remove(entry)

    def _forget(self, entry: _Entry) -> None:
        if self._entries.get(entry.model) is entry:
            self._remove(entry)
            self._evict()

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.model]
        self._occupied -= entry.weight
        self._unloading += entry.weight
        self._start(self._unload(entry))

    async def _unload(self, entry: _Entry) -> None:
        await asyncio.sleep(_UNLOAD_SECONDS)
        again = self._entries.get(entry.model)
        if again is None or not again.is_loading:
            status, _ = await outcome(self._mesh.unload(entry.model))
            # If the runtime was killed meanwhile, its memory is free as well.
            self._count_failure("unloads", status)
        self._unloading -= entry.weight - self._pay(entry.weight)
        await self._notify()

    def _pay(self, size: int) -> int:
        paid = min(size, self._deficit)
        self._deficit -= paid
        return paid

    def _count_failure(self, what: str, status: str) -> None:
        if status != "OK":
            is_away = status == "UNAVAILABLE"
            self.counts[f"{what} of a runtime that is away" if is_away else f"failed {what}"] += 1

    # --- Tasks and waiting -----------------------------------------------------------------------

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _ignore(model: str, answer: Any) -> None:
    """Do nothing."""
