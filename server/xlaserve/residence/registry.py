"""The registry of loaded models and their versions."""

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from xlaserve.concurrency.abandoned import Abandoned
from xlaserve.concurrency.limited import LimitedCall
from xlaserve.errors import ModelNotFound, ModelNotReady
from xlaserve.errors.panics import ENDS
from xlaserve.model_config.config import ModelConfig
from xlaserve.residence.capacity import Reservation, fullest
from xlaserve.residence.executed_rows import ExecutedRows
from xlaserve.residence.failed_loads import FailedLoads, of_reload
from xlaserve.residence.lifecycle import Event, Lifecycle, State
from xlaserve.residence.repository.names import check_version_text
from xlaserve.residence.repository.remote.fetched import FetchedFiles
from xlaserve.residence.steps import is_planned, missing_step, steps_of
from xlaserve.runtime.loaded import ModelInfo, ModelMemory
from xlaserve.serving.access.sight import seen_now, without_names
from xlaserve.serving.call import Admission
from xlaserve.serving.checks import QuickCheck
from xlaserve.serving.observability.events import Origin
from xlaserve.serving.standing import Standing
from xlaserve.serving.standing import State as StandingState
from xlaserve.serving.stations.backlog import Backlog
from xlaserve.serving.stations.station import MakeStation, Station
from xlaserve.serving.statistics import VersionStatistics


class Loaded(Protocol):
    """A loaded model or ensemble."""

    @property
    def info(self) -> ModelInfo:
        """Return the description of the model."""
        ...

    def stop(self) -> None:
        """Stop background compilation. Does not block."""
        ...

    def close(self) -> None:
        """Release every buffer and executable."""
        ...


class Instance:
    """One loaded copy of a model version, and the number of requests that use it.

    A reload creates a new instance. Requests keep the one they started with.
    """

    def __init__(
        self,
        runner: Loaded,
        fingerprint: object,
        reservation: Reservation,
        config: ModelConfig,
        device: str = "cpu:0",
        *,
        make_station: MakeStation,
    ) -> None:
        self.runner = runner
        self.fingerprint = fingerprint
        self.config = config
        self.device = device
        """The first device of the server."""
        self.platform = device.partition(":")[0]
        """The JAX platform of the server."""
        self.reservation = reservation
        self.quick = QuickCheck(runner.info, config)
        self.fault = ""
        """Why requests are rejected although the model is loaded; empty if they are not."""
        self.on_fault: Callable[[], None] = lambda: None
        """Called whenever `fault` changes."""
        self.stuck: LimitedCall[Any] | None = None
        """An abandoned compilation whose thread may still use the model."""
        self.url = ""
        """URL of a load in a multi-model container; empty otherwise."""
        self.fetched = FetchedFiles()
        """Files fetched from an object store, if any; set by the loader."""
        self._users = 0
        self._idle = asyncio.Event()
        self.has_left = False
        """Whether the instance was unloaded or replaced by a reload; once drained, it is closed."""
        self._leaving: list[Callable[[], None]] = []
        self._overstaying: list[Callable[[], None]] = []
        self._make_station = make_station
        self.station: Station = make_station(self, None)
        """Queues and executes the instance's requests; replaced by `renew`."""

    @property
    def model(self) -> str:
        """Return the name of the model."""
        return self.reservation.model

    @property
    def info(self) -> ModelInfo:
        """Return the description of the loaded model."""
        return self.runner.info

    @property
    def bucket_sizes(self) -> Sequence[int]:
        """Return the compiled batch sizes, ascending."""
        return sorted({bucket.rows for bucket in self.info.buckets})

    @property
    def memory(self) -> ModelMemory:
        """Return the memory of the loaded model and its labels."""
        return self.info.memory.with_labels(self.config.labels_bytes)

    @property
    def held(self) -> Mapping[str, int]:
        """Return the bytes held on each device."""
        return self.memory.on_devices(self.device)

    @property
    def parameters(self) -> Mapping[str, str]:
        """Return the parameters of the model's configuration."""
        return self.config.parameters

    @property
    def steps(self) -> Sequence[tuple[str, str]]:
        """Return the ensemble's steps: model name and version (empty for the newest version)."""
        return [(step.model_name, step.model_version) for step in self.config.steps]

    @property
    def pending(self) -> int:
        """Return the number of queued executions."""
        return sum(1 for _ in self.station.pending_since())

    def backlog(self, now_ns: int) -> Backlog:
        """Return the number of queued executions, and how long the oldest has been queued."""
        return Backlog.of(self.station.pending_since(), now_ns)

    def renew(self) -> None:
        """Rebuild the station after its inputs changed, and move queued calls to the new one."""
        before = self.station
        self.station = self._make_station(self, before)
        if self.station is before:
            return
        for call in before.retire():
            try:
                self.station.begin(call)
            except ENDS:
                raise
            except BaseException as error:
                call.fail(error)

    def on_leave(self, call: Callable[[], None]) -> None:
        """Register a callback for when an unload or reload removes this instance from service.

        Requests that use it may still be in progress.
        """
        self._leaving.append(call)

    def leave(self) -> None:
        """Mark the instance as removed from service, and run the `on_leave` callbacks once."""
        self.has_left = True
        leaving, self._leaving = self._leaving, []
        for call in leaving:
            call()

    def on_drain_expired(self, call: Callable[[], None]) -> None:
        """Register a callback for when requests still run `drain_seconds` after the removal.

        Used by requests that may never end on their own.
        """
        self._overstaying.append(call)

    def expire_drain(self) -> None:
        """Run the `on_drain_expired` callbacks, once."""
        overstaying, self._overstaying = self._overstaying, []
        for call in overstaying:
            call()

    def suspend(self, fault: str) -> None:
        """Reject new requests until `resume`; running ones continue."""
        self.fault = fault
        self.on_fault()

    def resume(self) -> None:
        """Accept requests again."""
        if self.fault:
            self.fault = ""
            self.on_fault()

    @property
    def is_stuck(self) -> bool:
        """Tell whether an abandoned thread may still use the model."""
        return self.stuck is not None and not self.stuck.future.done()

    def abandon(self, work: LimitedCall[Any], doing: str) -> Abandoned:
        """Record an abandoned thread that may still use the model; return its `Abandoned` entry."""
        self.stuck = work
        held = sum(self.reservation.sizes.values())
        return Abandoned(self.model, self.fingerprint, doing, held)

    def correct(self) -> None:
        """Set the reservation to the memory that the model holds now."""
        self.reservation.correct(self.held)

    @property
    def users(self) -> int:
        """Return the number of requests that use the instance."""
        return self._users

    def acquire(self) -> None:
        """Increment the use count; the caller must call `release`."""
        self._users += 1

    def release(self, count: int = 1) -> None:
        """Decrement the use count."""
        self._users -= count
        if not self._users:
            self._idle.set()

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Count a use of the instance for the duration of a block."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    async def drained(self) -> None:
        """Wait until no request uses the instance."""
        while self._users:
            self._idle.clear()
            await self._idle.wait()


class Version:
    """One version of a model: its lifecycle state, and the instance that serves it."""

    def __init__(self, model: str, number: str, admission: Admission) -> None:
        self.model = model
        self.number = number
        self.admission = admission
        self.lifecycle = Lifecycle()
        self.instance: Instance | None = None
        self.origin: Origin | None = None
        """Caller and time of the last successful load; set by the loader."""
        self.statistics = VersionStatistics()
        self.executed = ExecutedRows()

    def put(self, instance: Instance | None) -> None:
        """Replace the serving instance, keeping the counts of executions so far."""
        if self.instance is not None:
            self.executed.settle(self.statistics.totals(), self.instance.bucket_sizes)
        self.instance = instance

    @property
    def state(self) -> State:
        """Return the lifecycle state."""
        return self.lifecycle.state


@dataclass(slots=True)
class Model:
    """The registry entry of one model."""

    name: str
    admission: Admission
    versions: dict[str, Version] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        """Return the number of requests in progress, over all versions."""
        return self.admission.in_progress

    def newest(self, *, answering: bool = True) -> Version | None:
        """Return the highest version that answers, or the highest of all if not `answering`."""
        found = (v for v in self.versions.values() if v.state.answers or not answering)
        return max(found, key=lambda version: int(version.number), default=None)


class Registry:
    """The models known to the process. Used from the event loop only; never blocks."""

    def __init__(self, max_requests_per_model: int, standing: Standing | None = None) -> None:
        """`standing` is the state of the repository; by default it counts as completely read."""
        self.standing = standing or Standing(StandingState.SETTLED)
        self.failed = FailedLoads(self.notify)
        self._max_requests = max_requests_per_model
        self._models: dict[str, Model] = {}
        self._names: list[str] = []
        """Sorted model names: sorting thousands of them at every reading would block the event
        loop."""
        self.revision = 0
        """Number of changes: state transitions and forgotten models."""
        self._observers: set[Callable[[], None]] = set()
        self._resolved: dict[tuple[str, str], tuple[Version, Instance]] = {}
        """Cache of `resolve`, cleared at every change; at most two entries per version."""

    # --- Queries ---

    def models(self) -> list[Model]:
        """Return every known model, sorted by name."""
        return [self._models[name] for name in self._names]

    def find(self, name: str) -> Model | None:
        """Return a model's entry, or None if no load was ever attempted."""
        return self._models.get(name)

    def resolve(self, name: str, number: str = "") -> tuple[Version, Instance]:
        """Return the ready version with this number, or the newest ready one.

        Raises ModelNotFound if nothing is loaded, StillStarting if startup may still load it, or
        ModelNotReady while it loads or unloads, or while an ensemble lacks one of its steps.
        """
        found = self._resolved.get((name, number))
        if found is None:
            found = self._resolved[name, number] = self._resolve(name, number)
        return found

    def _resolve(self, name: str, number: str) -> tuple[Version, Instance]:
        check_version_text(name, number)
        model = self._models.get(name)
        if model is None:
            reason = self.failed.reason(name)
            if reason:
                raise self.standing.absent(name, number, detail=_unavailable(reason))
            raise self.standing.absent(name, number)
        version = model.versions.get(number) if number else model.newest()
        if number and model.newest() is not None:
            if version is None:
                raise self.standing.absent(name, number, is_other=True)
            if version.state is State.UNAVAILABLE:
                detail = _unavailable(_reason(version, self.failed))
                raise self.standing.absent(name, number, detail=detail, is_other=True)
        if version is None:
            self._raise_unavailable(model, number)
        assert version is not None
        if version.instance is None or not version.state.answers:
            self._raise_not_ready(version, number)
        assert version.instance is not None
        missing = version.instance.fault or missing_step(version.instance, self._answering)
        if missing:
            error = ModelNotReady(name, number, State.UNAVAILABLE, missing)
            steps = steps_of(version.instance, self._answering)
            error.steps = tuple(dict.fromkeys(step for step, _ in steps))
            raise error
        return version, version.instance

    def _raise_unavailable(self, model: Model, number: str) -> None:
        newest = None if number else model.newest(answering=False)
        if newest is None:
            raise self.standing.absent(model.name, number)
        moving = [v for v in model.versions.values() if v.state is not State.UNAVAILABLE]
        self._raise_not_ready(moving[-1] if moving else newest, number)

    def _raise_not_ready(self, version: Version, requested: str) -> None:
        state, reason = version.state, _reason(version, self.failed)
        if state is State.UNAVAILABLE:
            raise self.standing.absent(version.model, requested, detail=_unavailable(reason))
        raise ModelNotReady(version.model, requested, state.public, reason)

    def _answering(self, name: str, number: str) -> Instance | None:
        """Return the instance that serves a step of an ensemble; None if there is none."""
        model = self._models.get(name)
        version = None
        if model is not None:
            version = model.versions.get(number) if number else model.newest()
        return version.instance if version is not None and version.state.answers else None

    def is_planned(self, instance: Instance) -> bool:
        """Tell whether an ensemble's plan matches the currently loaded steps."""
        return is_planned(instance, self._answering)

    def ready(self, name: str, number: str = "") -> bool:
        """Tell whether an inference request would be accepted now."""
        try:
            self.resolve(name, number)
        except (ModelNotFound, ModelNotReady):
            return False
        return True

    def answering(self, name: str) -> frozenset[str]:
        """Return the versions of a model that would accept an inference request now."""
        model = self._models.get(name)
        numbers = () if model is None else model.versions
        return frozenset(number for number in numbers if self.ready(name, number))

    def shown_state(self, version: Version) -> tuple[str, str]:
        """Return a version's state and reason as the repository index shows them."""
        if version.instance is not None and version.state.answers:
            missing = version.instance.fault or missing_step(version.instance, self._answering)
            if missing:
                return State.UNAVAILABLE.public, missing
        return version.state.public, _reason(version, self.failed)

    # --- Changes ---

    def version(self, name: str, number: str) -> Version:
        """Return a version, creating its entry if there is none."""
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = Model(name, Admission(name, self._max_requests))
            insort(self._names, name)
        return model.versions.setdefault(number, Version(name, number, model.admission))

    def change(self, version: Version, event: Event, reason: str = "") -> None:
        """Apply an event to a version's lifecycle, and notify the observers."""
        version.lifecycle.apply(event, reason)
        self.notify()

    def note(self, version: Version, reason: str) -> None:
        """Show the progress of a load as the reason in the index."""
        version.lifecycle.reason = reason

    def notify(self) -> None:
        """Notify observers of a possible change."""
        self.revision += 1
        self._resolved.clear()
        for observer in tuple(self._observers):
            observer()

    def size_bytes(self, name: str) -> int:
        """Return the memory of a model's loaded versions on the fullest device, in bytes.

        Raises ModelNotFound if none is loaded.
        """
        return fullest(instance.held for instance in self._loaded(name))

    def alone_bytes(self, name: str) -> int:
        """Return `size_bytes` as if the model shared no programs; raises ModelNotFound."""
        return fullest(one.memory.alone_on_devices(one.device) for one in self._loaded(name))

    def computation(self, name: str) -> str:
        """Return the key of a model's shared programs; empty if none, or for several versions.

        Raises ModelNotFound if no version is loaded.
        """
        found = [instance.memory.computation for instance in self._loaded(name)]
        return found[0] if len(found) == 1 else ""

    def needed_bytes(self, name: str) -> int:
        """Return the load's peak reservation on the fullest device; raises ModelNotFound."""
        return fullest(instance.reservation.needed for instance in self._loaded(name))

    def _loaded(self, name: str) -> list[Instance]:
        model = self._models.get(name)
        loaded = [v.instance for v in model.versions.values() if v.instance] if model else []
        if not loaded:
            raise ModelNotFound(name)
        return loaded

    def forget(self, name: str) -> None:
        """Remove a model's entry, unless one of its versions is loaded or loading."""
        model = self._models.get(name)
        self.failed.forget(name)
        self._resolved.clear()
        if model and all(v.state is State.UNAVAILABLE for v in model.versions.values()):
            del self._models[name]
            del self._names[bisect_left(self._names, name)]
            self.revision += 1

    @contextmanager
    def observe(self, observer: Callable[[], None]) -> Iterator[None]:
        """Call `observer` after every change, for the duration of a block."""
        self._observers.add(observer)
        try:
            yield
        finally:
            self._observers.discard(observer)

    @property
    def requests(self) -> int:
        """Return the number of requests in progress."""
        return sum(model.requests for model in self._models.values())


def _reason(version: Version, failed: FailedLoads) -> str:
    """Return the reason of a version's state, without names hidden from the current caller."""
    reason = failed.reason(version.model)
    if reason and version.state is State.UNAVAILABLE:
        return reason
    if reason and version.state is State.READY:
        return of_reload(reason)
    return without_names(version.lifecycle.reason, seen_now())


def _unavailable(reason: str) -> str:
    return "has no available versions" + (f" ({reason})" if reason else "")
