"""The cache of a ModelMesh over one runtime: it admits by prediction, and evicts when it knows.

It does what the real one was seen to do, with shorter delays: the size of a load is known when the
load is over; what that is more than predicted is a deficit, for which others are evicted then. What
is unloaded counts until that is done, and while it is more than the part that is kept for it, it
drives out more: so a load that fails on a full instance can empty it.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from support.mesh import Mesh, Outcome, lost, outcome

_UNLOAD_SECONDS = 0.02
"""Between the end of a model in the cache and its unload; 0.2, and 1 behind a failure, in truth."""
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Registered:
    """What a mesh knows of a model that is not loaded."""

    path: str
    """In loads."""
    asked_path: str
    """In questions for the size: behind a puller, that of the storage."""


class _Entry:
    """A model in the cache."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.weight = 0
        self.is_loading = True
        self.loaded: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.began = time.time()
        """Since the epoch, in seconds."""
        self.stages: dict[str, float] = {}
        """Seconds of its load, by what it waited for."""
        self._passed = time.monotonic()

    def passed(self, stage: str) -> None:
        """Note that a stage of its load has ended, and the next one begins."""
        now = time.monotonic()
        self.stages[stage] = now - self._passed
        self._passed = now


@dataclass(frozen=True, slots=True)
class Trace:
    """What a load for a request took, stage by stage."""

    model: str
    began: float
    """Since the epoch, in seconds."""
    stages: Mapping[str, float]
    """Seconds by what was waited for, in the order of time."""


class MeshCache:
    """Keeps as many models loaded as it believes to fit; the least recently used go."""

    def __init__(self, mesh: Mesh, ready: Any, models: Mapping[str, Registered]) -> None:
        """Of a mesh that has heard the answer `ready` when it started."""
        threads: int = ready.maxLoadingConcurrency
        self._mesh = mesh
        self._models = models
        self._capacity: int = ready.capacityInBytes
        self._default: int = ready.defaultModelSizeInBytes
        kept = threads * self._default // (2 if threads <= 2 else 4)
        self._kept: int = min(max(kept, self._capacity // 100), self._capacity // 10)
        """For what is being unloaded."""
        self._loaders = asyncio.Semaphore(threads)
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """The least recently used first."""
        self._occupied: int = 0
        """By entries."""
        self._unloading: int = 0
        """By what is no entry any more, less what loads and the deficit have borrowed of it."""
        self._deficit = 0
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        """What happened, and how often."""
        self.on_answer: Callable[[str, Any], None] = _ignore
        """Called with a model and its answer."""

    async def infer(self, model: str, request: Any) -> Outcome:
        """Pass a request on, once its model is loaded; that of a load which failed is its end."""
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
        """Tell whether a model is loaded."""
        entry = self._entries.get(model)
        return entry is not None and entry.loaded.done()

    def trace(self, model: str) -> Trace | None:
        """Return how the model of an entry was loaded; None where there is no entry."""
        entry = self._entries.get(model)
        return None if entry is None else Trace(model, entry.began, dict(entry.stages))

    async def settle(self) -> None:
        """Return when nothing is loaded or unloaded any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    # --- in ---

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
        """Make room for a load, and wait until the room is there."""
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

    # --- out ---

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
            # What a runtime held that was killed meanwhile is free as well.
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

    # --- waiting ---

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
