"""Loads and unloads one model version."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast
from weakref import WeakValueDictionary

import structlog

from xlaserve.artifact.foreseen import Serving
from xlaserve.artifact.sizes import shared_bytes
from xlaserve.concurrency.sharing import Coalesced
from xlaserve.concurrency.workers import Workers
from xlaserve.errors import (
    InvalidModel,
    LoadCancelled,
    LoadFailed,
    ModelNotFound,
    ModelNotReady,
    OutOfMappings,
    OutOfMemory,
    XlaserveError,
)
from xlaserve.language.text_limits import DEFAULT_TEXT_LIMITS, TextLimits
from xlaserve.model_config.config import ModelConfig
from xlaserve.residence.capacity import Capacity, Reservation, Sizes
from xlaserve.residence.eviction import next_to_evict, to_evict
from xlaserve.residence.failed_loads import INTERNAL, of_reload
from xlaserve.residence.finishing import Finisher
from xlaserve.residence.giving_up import CheckCancelled, until_given_up
from xlaserve.residence.lifecycle import Event, State
from xlaserve.residence.load_runner import Load, Loading, LoadLimits, LoadRunner, StageObserver
from xlaserve.residence.registry import Instance, Registry, Version
from xlaserve.residence.repository.exhaustion import read_failure
from xlaserve.residence.repository.remote.fetched import FetchedFiles
from xlaserve.residence.repository.sources import ModelSource, VersionSource
from xlaserve.runtime.devices.placement import ONE_CPU, Devices, with_file_of, without_effect
from xlaserve.runtime.host import PythonHost
from xlaserve.runtime.load_context import DEFAULT_MAX_SEQUENCES, MAX_ON_DEMAND_SHAPES, LoadContext
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.programs.mappings import UNLIMITED, Mappings
from xlaserve.runtime.programs.shared_programs import SharedPrograms
from xlaserve.serving.access.sight import seen_now, without_names
from xlaserve.serving.ensemble import EnsemblePlan, plan_ensemble
from xlaserve.serving.observability.event_notes import EventNotes, origin_now
from xlaserve.serving.stations.station import MakeStation

DEFAULT_LOAD_SECONDS = 600.0

_CANCELLED = (LoadCancelled, asyncio.CancelledError)


@dataclass(frozen=True, slots=True)
class Machinery:
    """The functions and objects of the runtime layer that loads call."""

    load: Load
    predict_size: Callable[..., Sizes]
    """Return the bytes that a version will need on each device; raises InvalidModel; blocks.

    The arguments are its directory, configuration, devices and roots, and `in_background`: whether
    most batch sizes are compiled after the load.
    """
    try_loading: Callable[[Path, ModelConfig, CheckCancelled], None]
    """Try to load a client's files in a separate process, because loading might crash. Raises
    InvalidModel, or LoadCancelled once the load is cancelled; blocks."""
    release_memory: Callable[[], None]
    """Collect garbage and return freed pages to the operating system; blocks."""
    devices: Callable[[], Devices]
    """Return the devices, after initializing JAX; called in a thread, may block."""
    mappings: Mappings = UNLIMITED
    """Limits the number of the process's memory mappings."""
    compilation: Compilation = field(default_factory=Compilation)
    programs: SharedPrograms = field(default_factory=SharedPrograms)
    """The compiled programs that loaded models share."""
    on_stage: StageObserver = lambda model, version, stage: None
    text_limits: TextLimits = DEFAULT_TEXT_LIMITS


class VersionLoader:
    """Loads and unloads instances of model versions, and shows each step in the registry."""

    def __init__(
        self,
        registry: Registry,
        workers: Workers,
        machinery: Machinery,
        capacity: Capacity,
        *,
        make_station: MakeStation,
        drain_seconds: float,
        load_seconds: float = DEFAULT_LOAD_SECONDS,
        memory_wait_seconds: float = 0.0,
        expect_unloads: bool = False,
        evict: bool = False,
        background_compile: bool = False,
        mmap_parameters: bool = False,
        processes: int = 1,
        max_on_demand_shapes: int = MAX_ON_DEMAND_SHAPES,
        python: PythonHost | None = None,
        max_sequences: int = DEFAULT_MAX_SEQUENCES,
        notes: EventNotes | None = None,
    ) -> None:
        self._notes = notes or EventNotes()
        self._make_station = make_station
        self._max_on_demand_shapes = max_on_demand_shapes
        self._max_sequences = max_sequences
        self._mmap_parameters = mmap_parameters
        self._processes = processes
        self._python = python
        self._background_compile = background_compile
        self._finisher = Finisher(workers, capacity, load_seconds)
        self._memory_wait_seconds = memory_wait_seconds
        self.expect_unloads: Callable[[], bool] = lambda: expect_unloads
        """Tells whether other models may be unloaded soon, so that a load that needs more memory
        than predicted should wait. Otherwise a load waits only for running unloads."""
        self._shrinking = 0
        """Number of loads that will shrink their reservation to the measured size when they end."""
        self._evict = evict
        self._registry = registry
        self._capacity = capacity
        self._workers = workers
        self._machinery = machinery
        self._drain_seconds = drain_seconds
        self._release = Coalesced(partial(workers.wait, machinery.release_memory))
        self._runner = LoadRunner(
            registry,
            workers,
            LoadLimits(load_seconds, drain_seconds),
            load=machinery.load,
            devices=machinery.devices,
            on_stage=machinery.on_stage,
            release=self._release,
        )
        self._stragglers: set[asyncio.Task[None]] = set()
        self._unloading: dict[Version, asyncio.Future[None]] = {}
        """Versions being unloaded, with futures that complete when the unload has ended."""
        self._instances: WeakValueDictionary[Reservation, Instance] = WeakValueDictionary()
        """Instances that hold memory: those answering and those being drained."""
        self._to_correct: deque[Reservation] = deque()
        """Reservations whose model reported a change of its memory."""
        self._devices: Devices | None = None
        self._log = structlog.get_logger("loading")

    async def load(self, version: Version, model: ModelSource, source: VersionSource) -> None:
        """Load a version. A version already loaded keeps answering until the new instance is ready.

        Raises LoadFailed, OutOfMemory, LoadCancelled or TooManyAbandoned; the old instance then
        stays.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        # Another load may evict this version in the meantime, hence the loop.
        while version in self._unloading:
            await asyncio.wait([self._unloading[version]])
        self._workers.abandoned.check(version.model, source.fingerprint)
        self._registry.change(version, Event.LOAD, "waiting for a load thread")
        reservation = Reservation(self._capacity, version.model)
        fetched = FetchedFiles()
        self._finisher.load_begins()
        try:
            runner = await self._make(version, model, source, reservation, fetched)
        except BaseException as error:
            reservation.release()
            fetched.release()
            self._note_failure(version, error)
            raise
        finally:
            self._finisher.load_ends()
        devices = self._devices or ONE_CPU
        loaded = Instance(
            runner,
            source.fingerprint,
            reservation,
            model.config,
            devices.names[0],
            make_station=self._make_station,
        )
        loaded.fetched = fetched
        loaded.on_fault = self._registry.notify
        replaced = version.instance
        version.put(loaded)
        self._instances[reservation] = loaded
        # The memory counted for this model may have changed since the reservation was set.
        self._correct(reservation)
        seconds = loop.time() - started
        version.statistics.loaded(seconds, time.time_ns())
        version.origin = origin_now()
        self._notes.loaded(version.model, version.number, again=replaced is not None)
        self._registry.change(version, Event.LOADED)
        self._log.info(
            "model loaded",
            model=version.model,
            version=version.number,
            seconds=round(seconds, 3),
            compile_seconds=round(runner.info.compile_seconds, 3),
            cached_programs=runner.info.cached_programs,
            shared_programs=runner.info.shared_programs,
            size_bytes=loaded.memory.total_bytes,
            buckets={b.rows: round(b.compile_seconds, 3) for b in runner.info.buckets},
            split_batches={b.rows: b.split_rows for b in runner.info.buckets if b.split_rows},
        )
        unused = (*model.config.without_effect, *without_effect(model.config, devices.platform))
        if unused:
            self._log.warning(
                "configuration fields without effect",
                model=version.model,
                version=version.number,
                fields=list(unused),
            )
        for event, reason in (
            ("a layer of the model may be in training mode", runner.info.training),
            ("requests are not batched", runner.info.notice),
        ):
            if reason:
                self._log.warning(event, model=version.model, version=version.number, reason=reason)
        if self._background_compile and not loaded.steps:
            self._finisher.finish(version, loaded, cast(LoadedModel, runner))
        if replaced is not None:
            await self._retire([replaced])

    async def unload(self, versions: Iterable[Version], *, evicted_for: str = "") -> None:
        """Stop answering from these versions and return once their memory is free.

        `evicted_for` names the model whose load needs the memory, if this is an eviction.

        Requests in flight are drained for `drain_seconds`. After that this method returns while the
        remaining requests continue, and the memory is freed after the last one; decoupled responses
        are cut off.
        """
        answering = [version for version in versions if version.state.answers]
        instances = []
        done = asyncio.get_running_loop().create_future()
        self._unloading |= dict.fromkeys(answering, done)
        for version in answering:
            self._registry.change(version, Event.UNLOAD, "waiting for requests in progress")
            if version.instance is not None:
                instances.append(version.instance)
            version.put(None)
        try:
            await self._retire(instances)
        finally:
            done.set_result(None)
            for version in answering:
                del self._unloading[version]
                version.statistics.unloads += 1
                self._registry.change(version, Event.UNLOADED, "unloaded")
                self._notes.unloaded(version.model, version.number, for_model=evicted_for)
                self._log.info("model unloaded", model=version.model, version=version.number)

    async def close(self) -> None:
        """Wait for instances with requests that outlived `drain_seconds`."""
        await self._finisher.close()
        if self._stragglers:
            await asyncio.wait(self._stragglers)

    # --- Loading ---

    async def _make(
        self,
        version: Version,
        model: ModelSource,
        source: VersionSource,
        reservation: Reservation,
        fetched: FetchedFiles,
    ) -> LoadedModel | EnsemblePlan:
        try:
            if model.config.is_ensemble:
                source = await fetched.fetch(self._workers, version.model, source)
                await self._workers.wait(source.verify, model.config, lambda: None)
                return self._plan(model)
            return await self._load_booked(version, model, source, reservation, fetched)
        except InvalidModel as error:
            raise read_failure(version.model, str(error), error.__cause__) from error
        except MemoryError as error:
            raise OutOfMemory(
                version.model, "failed to load it, the host is out of memory"
            ) from error

    async def _load_booked(
        self,
        version: Version,
        model: ModelSource,
        source: VersionSource,
        reservation: Reservation,
        fetched: FetchedFiles,
    ) -> LoadedModel:
        """Reserve the predicted size, load, then set the reservation to the measured size.

        Files in an object store are fetched only after the memory is reserved.

        Raises OutOfMemory, after closing the model, if the measured size does not fit.
        """
        if source.sent:
            self._registry.note(version, "loading in a separate process")
            trial = partial(self._machinery.try_loading, source.directory, model.config)
            await until_given_up(self._workers, version.model, trial)
        if self._devices is None:
            starting = self._workers.load(self._machinery.devices)
            self._devices = await asyncio.wrap_future(starting.future)
        devices = self._devices
        model = replace(model, config=with_file_of(model.config, devices))
        predicted = await self._workers.wait(self._predict, source, model.config, devices)
        await self._book(reservation, predicted)
        if source.remote is not None:
            self._registry.note(version, "fetching")
            source = await fetched.fetch(self._workers, version.model, source)
        self._shrinking += 1
        try:
            runner = await self._run_evicting(version, model, source, reservation)
        finally:
            self._shrinking -= 1
        memory = runner.info.memory.with_labels(model.config.labels_bytes)
        try:
            await self._book(reservation, memory.on_devices(devices.names[0]))
        except OutOfMemory:
            await self._workers.wait(runner.close)
            await self._release()
            raise
        return runner

    def _predict(self, source: VersionSource, config: ModelConfig, devices: Devices) -> Sizes:
        """Predict the bytes per device from the headers of the files. Blocks."""
        machinery, later = self._machinery, self._background_compile
        sizes = machinery.predict_size(
            source.directory, config, devices, source.roots, in_background=later
        )
        if devices.platform != "cpu" or not machinery.programs.counts[0]:
            return sizes
        compiled_from = machinery.programs.compiled_from
        serving = Serving(config=config, in_background=later)
        shared = shared_bytes(source.directory, compiled_from, source.roots, serving)
        return {device: max(0, size - shared) for device, size in sizes.items()}

    async def _book(self, reservation: Reservation, sizes: Sizes) -> None:
        """Reserve these sizes, or raise OutOfMemory.

        May evict idle models for the memory, and waits up to `memory_wait_seconds` for memory that
        other models are about to release.
        """
        until = (loop := asyncio.get_running_loop()).time() + self._memory_wait_seconds
        while missing := reservation.missing(sizes):
            leaving: list[Version] = []
            if self._evict:
                leaving = to_evict(self._registry, missing, sparing=reservation.model)
            if leaving:
                loading = reservation.model
                for version in leaving:
                    self._log.info("model evicted", model=version.model, for_model=loading)
                await self.unload(leaving, evicted_for=loading)
            elif reservation.exceeds(sizes) or not await self._changed(until - loop.time()):
                break
        reservation.set(sizes)

    async def _changed(self, seconds: float) -> bool:
        """Wait for other models to release memory; False after a timeout or if none is expected."""
        if seconds <= 0 or not (self._stragglers or self._shrinking or self.expect_unloads()):
            return False
        try:
            await asyncio.wait_for(self._capacity.changed(), seconds)
        except TimeoutError:
            return False
        return True

    def _plan(self, model: ModelSource) -> EnsemblePlan:
        described = {}
        for step in model.config.steps:
            try:
                _, instance = self._registry.resolve(step.model_name, step.model_version)
            except (ModelNotFound, ModelNotReady) as error:
                message = without_names(str(error), seen_now())
                raise LoadFailed(model.name, f"its step is not ready: {message}") from error
            described[step.model_name, step.model_version] = instance.info
        return plan_ensemble(model.config, described)

    async def _run_evicting(
        self,
        version: Version,
        model: ModelSource,
        source: VersionSource,
        reservation: Reservation,
    ) -> LoadedModel:
        """Load a model; if memory mappings run out, evict an idle model and try again."""
        while True:
            try:
                return await self._run_loader(version, model, source, reservation)
            except OutOfMappings:
                await self._release()
                sparing = version.model
                leaving = next_to_evict(self._registry, sparing=sparing) if self._evict else []
                if not leaving:
                    raise
            self._log.info("model evicted", model=leaving[0].model, for_model=sparing)
            await self.unload(leaving, evicted_for=sparing)

    async def _run_loader(
        self,
        version: Version,
        model: ModelSource,
        source: VersionSource,
        reservation: Reservation,
    ) -> LoadedModel:
        context = LoadContext(
            model=version.model,
            version=version.number,
            config=model.config,
            background_compile=self._background_compile,
            mmap_parameters=self._mmap_parameters,
            processes=self._processes,
            max_on_demand_shapes=self._max_on_demand_shapes,
            max_sequences=self._max_sequences,
            text_limits=self._machinery.text_limits,
            roots=source.roots,
            is_sent=source.sent,
            python=self._python,
            mappings=self._machinery.mappings,
            compilation=self._machinery.compilation,
            programs=self._machinery.programs,
            on_memory=partial(self._correct_soon, asyncio.get_running_loop(), reservation),
            # Queued, to be corrected together with the reservation of the model that takes over.
            on_handed_on=partial(self._to_correct.append, reservation),
        )
        return await self._runner.run(Loading(version, source, reservation, context))

    def _correct_soon(self, loop: asyncio.AbstractEventLoop, reservation: Reservation) -> None:
        """Schedule a correction of the reservation; called in any thread."""
        self._to_correct.append(reservation)
        with suppress(RuntimeError):  # the event loop may be closed
            loop.call_soon_threadsafe(self._correct_all)

    def _correct_all(self) -> None:
        while self._to_correct:
            self._correct(self._to_correct.popleft())

    def _correct(self, reservation: Reservation) -> None:
        instance = self._instances.get(reservation)
        if instance is not None and instance.held != reservation.sizes:
            instance.correct()

    def _note_failure(self, version: Version, error: BaseException) -> None:
        reason = INTERNAL
        if isinstance(error, XlaserveError):
            reason = str(error)
        elif isinstance(error, _CANCELLED):
            reason = "the load was cancelled"
        again = version.state is State.RELOADING
        self._notes.load_failed(version.model, version.number, error, reason, again=again)
        if again:
            reason = of_reload(reason)
        version.statistics.load_failures += 1
        self._registry.change(version, Event.FAILED, reason)
        if not isinstance(error, _CANCELLED):  # Cancelling logs cancelled loads
            fields = {"model": version.model, "version": version.number, "reason": reason}
            self._log.warning("model not loaded", **fields)

    # --- Unloading ---

    async def _retire(self, instances: list[Instance]) -> None:
        """Free instances after their last request; stop waiting after `drain_seconds`."""
        if not instances:
            return
        freeing = asyncio.ensure_future(self._free(instances))
        self._stragglers.add(freeing)
        freeing.add_done_callback(self._stragglers.discard)
        await asyncio.wait([freeing], timeout=self._drain_seconds)
        if freeing.done():
            freeing.result()
            return
        for instance in instances:
            instance.expire_drain()

    async def _free(self, instances: Sequence[Instance]) -> None:
        closed = []
        for instance in instances:
            instance.leave()
            instance.runner.stop()
            await self._finisher.left(instance)
            await instance.drained()
            if instance.stuck is not None and instance.is_stuck:
                # The abandoned thread may still use the instance: free it when the thread ends.
                instance.stuck.whenever(partial(self._free_later, instance))
                continue
            await self._workers.wait(instance.runner.close)
            closed.append(instance)
        await self._release()
        for instance in closed:
            instance.reservation.release()
            instance.fetched.release()

    def _free_later(self, instance: Instance) -> None:
        freeing = asyncio.ensure_future(self._free([instance]))
        self._stragglers.add(freeing)
        freeing.add_done_callback(self._stragglers.discard)
