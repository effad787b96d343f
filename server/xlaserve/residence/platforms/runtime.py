"""The model runtime for ModelMesh: ids, sizes, capacity, and the purge."""

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from xlaserve.artifact.load_key import load_key
from xlaserve.concurrency.control_plane import Change, ChangeKind
from xlaserve.errors import InvalidSettings, LoadCancelled, ModelNotFound, OutOfMemory
from xlaserve.files.roots import Roots
from xlaserve.model_config.config import ModelConfig
from xlaserve.residence.capacity import Capacity, Sizes
from xlaserve.residence.control import ModelControl
from xlaserve.residence.host import load_threads
from xlaserve.residence.platforms.predictions import FileReader, FilesSeen, Predictions, keep
from xlaserve.residence.platforms.reported_sizes import Holding, ReportedSizes
from xlaserve.residence.registry import Registry
from xlaserve.residence.repository.repository import Repository
from xlaserve.residence.repository.sources import Location
from xlaserve.runtime.devices.placement import ONE_CPU, Devices
from xlaserve.settings import Settings

PredictSize: TypeAlias = Callable[[Path, ModelConfig, Devices, Roots], Sizes]
"""Predicts the bytes that loading a version directory needs on each device. Raises InvalidModel;
blocks."""

MAX_SIZE_BYTES = (2**31 - 1) * 8192
"""The largest size that ModelMesh can represent: a signed 32-bit count of 8 KiB units."""
MAX_NUMBER = 2**31 - 1
"""The largest signed 32-bit number: the mesh reads unsigned fields as signed."""

_COMPILED_BYTES = 8 << 20
"""Added for executables and buffers if only the size of the model file is known."""

_LEAST_SLACK, _MOST_SLACK = 20, 4
"""Without `mesh_slack_bytes`, at least 1/20 and at most 1/4 of the memory is withheld from the
mesh. A model larger than the capacity reported to the mesh is never loaded."""

_KEPT_FOR_UNLOADS = 10
"""A mesh keeps up to 1/10 of its capacity free for unloads, and evicts when models exceed the
rest."""

_MAX_CONCURRENCY_PARAMETER = "max_concurrency"
_POSITIVE = re.compile("[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class RuntimeLimits:
    """Limits that ModelMesh reads once and treats as constant (ModelMesh SPI, runtimeStatus)."""

    capacity_bytes: int
    loading_concurrency: int
    loading_timeout_ms: int
    default_size_bytes: int
    limit_concurrency: bool
    slack_bytes: int = 0
    """Memory withheld from the mesh."""

    @classmethod
    def of(
        cls,
        settings: Settings,
        memory_bytes: int,
        largest_bytes: int = 0,
        shared_bytes: int = 0,
    ) -> "RuntimeLimits":
        """Compute the limits; raises InvalidSettings for values with which ModelMesh would exit.

        The mesh is told less than the available memory. It admits loads by predicted sizes and
        evicts when it learns the measured ones; until then each running load may exceed the
        capacity. Also, memory that models share stays when the mesh unloads the model it counted it
        for. So `shared_bytes`, the most that models were seen to share, is withheld in addition.
        """
        default = settings.default_model_size_bytes
        needed = max(2 * default, min(512 << 20, 10 * default))
        slack = max(0, settings.mesh_slack_bytes)
        if memory_bytes < needed + slack:
            besides = f" besides a mesh_slack_bytes of {slack}" if slack else ""
            raise InvalidSettings(
                "capacity_bytes",
                f"at least {needed + slack} bytes of model memory, which ModelMesh requires for a"
                f" default_model_size_bytes of {default}{besides} (0 means the memory of the"
                " device or container minus memory_overhead_bytes)",
                memory_bytes,
            )
        if settings.mesh_slack_bytes < 0:
            largest = load_threads(settings) * max(default, largest_bytes)
            wanted = max(memory_bytes // _LEAST_SLACK, largest + shared_bytes)
            slack = min(wanted, memory_bytes // _MOST_SLACK)
        capacity_bytes = max(needed, memory_bytes - slack)
        for name, value, most in (
            ("capacity_bytes", capacity_bytes, MAX_SIZE_BYTES),
            ("load_threads", load_threads(settings), MAX_NUMBER),
            ("model_loading_timeout_ms", settings.model_loading_timeout_ms, MAX_NUMBER),
            ("max_concurrency", settings.max_concurrency, MAX_NUMBER),
        ):
            if value > most:
                raise InvalidSettings(name, f"at most {most}, the limit of ModelMesh", value)
        return cls(
            capacity_bytes,
            load_threads(settings),
            settings.model_loading_timeout_ms,
            default,
            settings.limit_model_concurrency,
            memory_bytes - capacity_bytes,
        )

    def may_evict(self, counted_bytes: int) -> bool:
        """Tell whether a mesh may evict when its models add up to this many bytes."""
        return counted_bytes > self.capacity_bytes - self.capacity_bytes // _KEPT_FOR_UNLOADS


@dataclass(frozen=True, slots=True)
class RuntimeModel:
    """The model of a load, or of a request for a predicted size."""

    id: str
    location: Location
    key: Hashable = ""
    """The model key as received, which identifies a model together with its path."""
    disk_size_bytes: int = 0
    """The file size that the mesh knows, in bytes; 0 if unknown."""

    @property
    def files(self) -> Hashable:
        """Return a key for the model's files, independent of its id."""
        return self.location, self.key


@dataclass(frozen=True, slots=True)
class LoadedSize:
    """The result of a load, reported to the mesh."""

    size_bytes: int
    max_concurrency: int
    """Maximum concurrent requests per model; 0 if the mesh does not limit concurrency."""


class ModelRuntime:
    """Loads and unloads models by id, for the mesh only."""

    def __init__(
        self,
        settings: Settings,
        control: ModelControl,
        registry: Registry,
        repository: Repository,
        capacity: Capacity,
        *,
        predict_size: PredictSize,
        file_reader: FileReader,
    ) -> None:
        self._settings = settings
        self._control = control
        self._registry = registry
        self._repository = repository
        self._capacity = capacity
        self._predict_size = predict_size
        self._file_reader = file_reader
        self._predictions = Predictions(settings.max_remembered_sizes)
        self._reported = ReportedSizes(self._holding, self._shared_room_bytes)
        self._largest_shared_bytes = 0
        """Largest amount of memory observed that a model uses but another model accounts for."""
        self._predicted: OrderedDict[str, int] = OrderedDict()
        """Predicted sizes reported to the mesh for models that are not loaded yet, by id."""
        self._loading: Counter[str] = Counter()
        """Number of loads in progress, by id."""
        control.expect_unloads(self._unloads_expected)
        self.limits: RuntimeLimits | None = None
        """Limits reported in the last call of the mesh; None before the first."""
        control.plane.handle(ChangeKind.LOAD_AT, self._load_change)

    async def status(self) -> RuntimeLimits | None:
        """Return the limits once the runtime is ready; None before.

        READY tells the mesh that nothing is loaded, so every model is purged first, even if an
        earlier call reported READY. A mesh calls this only when it starts and knows of no loaded
        models. If only the runtime restarted, a running mesh may have loaded models into it without
        this call.
        """
        if not self._control.follower.server_ready or self._capacity.smallest_bytes is None:
            return None
        await self._control.plane.apply(Change(ChangeKind.PURGE), self._control.purge)
        count = self._settings.processes
        largest = self._predictions.largest_bytes * count
        memory = self._capacity.smallest_bytes * count
        shared = self._largest_shared_bytes * count
        self.limits = RuntimeLimits.of(self._settings, memory, largest, shared)
        return self.limits

    async def load(self, model: RuntimeModel) -> LoadedSize:
        """Load a model, and return when its first request will not need to compile.

        No error if the same files are already loaded under this id. Raises LoadFailed, OutOfMemory
        or LoadCancelled (ModelMesh SPI, loadModel).
        """
        arguments = {"path": model.location.path, "schema": model.location.schema, "key": model.key}
        change = Change(ChangeKind.LOAD_AT, model.id, arguments)
        self._loading[model.id] += 1
        try:
            return await self._control.plane.apply(change, partial(self._load_here, model))
        finally:
            self._loading[model.id] -= 1
            if not self._loading[model.id]:
                del self._loading[model.id]
                self._predicted.pop(model.id, None)

    async def _load_change(self, change: Change) -> None:
        arguments = change.arguments
        location = Location(arguments["path"], arguments["schema"])
        await self._load_here(RuntimeModel(change.subject, location, arguments["key"]))

    async def _load_here(self, model: RuntimeModel) -> LoadedSize:
        find = partial(self._repository.find_at, model.id, model.location)
        keys = [model.files]

        async def add_key() -> None:
            seen = await self._seen(model)
            if seen is not None:
                keys.append(seen.key)

        try:
            # Read the files before the load: afterwards, an unload could run before the load is
            # answered.
            await self._control.load_from(model.id, model.files, find, before=add_key)
        except OutOfMemory as error:
            if needed := error.needed_bytes:
                self._predictions.remember(model.id, needed, *keys, refused=True)
            raise
        try:
            needed = self._registry.needed_bytes(model.id)
            alone = self._registry.alone_bytes(model.id)
            shared = alone - self._registry.size_bytes(model.id)
            self._largest_shared_bytes = max(self._largest_shared_bytes, shared)
            size = self._countable(self._reported.report(model.id))
            loaded = LoadedSize(size, self._max_concurrency(model.id))
        except ModelNotFound:
            raise LoadCancelled(model.id) from None  # unloaded before its size could be reported
        # Remember the size without sharing: the model that now accounts for shared programs may be
        # gone by the next load.
        self._predictions.remember(model.id, max(alone, needed), *keys)
        return loaded

    async def unload(self, model_id: str) -> None:
        """Unload a model and free its memory. An unknown id is no error."""
        evict = partial(self._control.evict, model_id)
        await self._control.plane.apply(Change(ChangeKind.EVICT, model_id), evict)

    def size_bytes(self, model_id: str) -> int:
        """Return the size of a loaded model as reported to the mesh, at least 1.

        A mesh knows a single capacity: that of the smallest device. A model's size is its memory on
        the fullest device, so no device is asked for more than it has. Raises ModelNotFound.
        """
        try:
            return self._countable(self._reported.update(model_id))
        except ModelNotFound:
            raise self._registry.standing.absent(model_id) from None

    def reported_bytes(self, model_id: str) -> int | None:
        """Return the size that the mesh knows, without updating it; None if it knows none."""
        size = self._reported.of(model_id)
        return None if size is None else self._countable(size)

    @property
    def unreported_bytes(self) -> int:
        """Return how much memory models hold beyond the sizes that the mesh knows."""
        return self._reported.unreported_bytes()

    def _holding(self, model_id: str) -> Holding:
        registry = self._registry
        return Holding(
            registry.size_bytes(model_id),
            registry.alone_bytes(model_id),
            registry.computation(model_id),
        )

    def _shared_room_bytes(self) -> int:
        """Return the part of the slack that shared programs may use, in bytes per process."""
        if self.limits is None:
            return 0
        count = self._settings.processes
        largest = max(self.limits.default_size_bytes, self._predictions.largest_bytes * count)
        room = self.limits.slack_bytes - self.limits.loading_concurrency * largest
        return max(0, room) // count

    def _unloads_expected(self) -> bool:
        """Tell whether the mesh may soon unload a model on its own.

        It does so when the reported sizes and the predicted sizes of loads in progress exceed its
        capacity. Otherwise no memory will be freed, and waiting for it is useless.
        """
        if self.limits is None:
            return True
        coming = [self._predicted.get(model_id) for model_id in self._loading]
        if None in coming:
            return True
        counted = self._countable(self._reported.total_bytes) + sum(size or 0 for size in coming)
        if len(self._loading) > 1:
            # Another load may already hold more memory than predicted, and will report that size.
            fullest = max(map(self._capacity.used_on, self._capacity.totals))
            counted = max(counted, self._countable(fullest))
        return self.limits.may_evict(counted)

    def _countable(self, size_bytes: int) -> int:
        """Multiply a size by the number of processes, limited to the range of the mesh's field."""
        return min(size_bytes * self._settings.processes, MAX_SIZE_BYTES)

    async def predict_size_bytes(self, model: RuntimeModel) -> int:
        """Predict how much memory a load will need, within a fraction of a second.

        Uses the first of these that is known: the need of an earlier load (even a rejected one)
        with this id, the same files or the same computation; the sizes in the headers of its files;
        the file size known to the mesh; the 90th percentile of all needs; the default. Memory of
        other models that the mesh does not count is added, so that the mesh makes room for it.
        """
        self._predictions.note_request(model.id, model.files)
        needed = self._predictions.of_id(model.id) or self._predictions.of_key(model.files)
        if needed is not None and needed > (self._capacity.smallest_bytes or MAX_SIZE_BYTES):
            # The mesh will not try to load such a large model. When it asks again, minutes later,
            # the files may have changed, and then it has to try.
            self._predictions.forget(model.id, model.files)
        if needed is None:
            seen = await self._seen(model)
            if seen is not None:
                needed = self._predictions.of_key(seen.key) or seen.needed_bytes
        if needed is None and model.disk_size_bytes:
            needed = model.disk_size_bytes + _COMPILED_BYTES
        needed = needed or self._predictions.typical_bytes
        if needed:
            predicted = self._countable(needed + self._reported.unreported_bytes())
        else:
            predicted = min(self._settings.default_model_size_bytes, MAX_SIZE_BYTES)
        keep(self._predicted, model.id, predicted, self._settings.max_remembered_sizes)
        return predicted

    async def _seen(self, model: RuntimeModel) -> FilesSeen | None:
        """Read the headers of a model's files, if its path may lie inside the allowed roots."""
        if not self._repository.reaches(model.location.path):
            return None
        return await self._file_reader(partial(self._read_files, model))

    def _read_files(self, model: RuntimeModel) -> FilesSeen:
        source = self._repository.find_at(model.id, model.location)
        devices = Devices.named(tuple(self._capacity.totals), self._capacity.kind) or ONE_CPU
        needed: Counter[str] = Counter()
        keys = []
        for version in source.versions:
            at, roots = version.directory, version.roots
            needed.update(self._predict_size(at, source.config, devices, roots))
            keys.append(load_key(at, source.config, roots))
        key = model.files if None in keys else tuple(keys)
        return FilesSeen(max(needed.values(), default=0), key)

    def _max_concurrency(self, model_id: str) -> int:
        if not self._settings.limit_model_concurrency:
            return 0
        _, instance = self._registry.resolve(model_id)
        requested = _POSITIVE.fullmatch(instance.parameters.get(_MAX_CONCURRENCY_PARAMETER, ""))
        return min(int(requested[0]), MAX_NUMBER) if requested else self._settings.max_concurrency
