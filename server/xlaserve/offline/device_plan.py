"""A plan of a repository on absent devices: which models compile, fit, or are evicted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xlaserve.errors import InvalidModel, InvalidSettings, OutOfMemory, XlaserveError
from xlaserve.offline.targets.compiling import Compilers
from xlaserve.offline.targets.jobs import Compiled, Job
from xlaserve.residence.capacity import Capacity, Reservation, Sizes, greatest
from xlaserve.residence.eviction import first_to_give
from xlaserve.residence.host import capacity_bytes
from xlaserve.residence.platforms.runtime import RuntimeLimits
from xlaserve.residence.repository.repository import Repository
from xlaserve.residence.repository.sources import ModelSource, VersionSource
from xlaserve.runtime import loaders
from xlaserve.runtime.devices.placement import Devices
from xlaserve.runtime.devices.target_kinds import Target
from xlaserve.runtime.programs.compilation import XlaOptions
from xlaserve.settings import Settings


@dataclass(frozen=True, slots=True)
class PlannedVersion:
    """One version of a model, compiled for the target devices."""

    name: str
    version: str
    compiled: Compiled
    predicted: Sizes
    """Bytes per device that the load reserves before it begins, and reports to ModelMesh
    (predictModelSize); empty for a model that cannot be loaded."""

    @property
    def reserved(self) -> Sizes:
        """Return the bytes per device reserved after the load; empty if the load fails."""
        return self.compiled.reserved.per_device if self.compiled.reserved else {}

    @property
    def predicted_bytes(self) -> int:
        """Return the size reported to ModelMesh before the load: that of the fullest device."""
        return max(self.predicted.values(), default=0)

    @property
    def reserved_bytes(self) -> int:
        """Return the size reported to ModelMesh after the load: that of the fullest device."""
        return max(self.reserved.values(), default=0)


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """The outcome of a load that follows all earlier loads."""

    name: str
    version: str
    evicted: tuple[str, ...] = ()
    """Models evicted to make room, least recently used first, as `name/version`."""
    refused: str = ""
    """Why a model that compiles was not loaded; empty if it was loaded."""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The outcome of loading a whole repository, in the order of names."""

    target: Target
    count: int
    capacity_bytes: int
    """Bytes available for models on each device."""
    versions: tuple[PlannedVersion, ...]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Why a directory is not a valid model, by its name."""
    ensembles: tuple[str, ...] = ()
    """Names of ensembles, which have nothing to compile."""
    loads: tuple[PlannedLoad, ...] = ()
    resident: tuple[str, ...] = ()
    """Models loaded at the end, in the order of their eviction."""
    mesh_capacity_bytes: int = 0
    """Capacity reported to ModelMesh (runtimeStatus); 0 if it is too small for ModelMesh."""
    mesh_problem: str = ""

    @property
    def fits_together(self) -> bool:
        """Tell whether all models that compile can be loaded together, without evictions."""
        return not any(load.evicted or load.refused for load in self.loads)


class DevicePlanner:
    """Plans one repository for target devices."""

    def __init__(self, settings: Settings, repository: Repository, compilers: Compilers) -> None:
        self._settings = settings
        self._repository = repository
        self._compilers = compilers

    def plan(
        self,
        target: Target,
        count: int = 1,
        *,
        cache_directory: str = "",
        on_done: Callable[[Compiled], None] = lambda done: None,
    ) -> DevicePlan:
        """Compile all models for `count` devices of a target, and plan their loads.

        Raises DeviceUnavailable if nothing can be compiled for the target.
        """
        unreadable: dict[str, str] = {}
        sources = list(self._sources(unreadable))
        found = [
            (source, version)
            for source in sources
            if not source.config.is_ensemble
            for version in source.versions
        ]
        jobs = [
            Job(
                source.name,
                str(version.directory),
                target.name,
                count,
                self._repository.url(source.name),
                options=XlaOptions.of(self._settings),
                cache_directory=cache_directory,
            )
            for source, version in found
        ]
        compiled = self._compilers.compile(jobs, on_done)
        devices = Devices(target.platform, count, target.kind)
        versions = tuple(
            PlannedVersion(
                source.name, str(version.number), done, _predicted(source, version, done, devices)
            )
            for (source, version), done in zip(found, compiled, strict=True)
        )
        ensembles = tuple(source.name for source in sources if source.config.is_ensemble)
        placed = self._placed(target, devices, versions)
        return replace(placed, unreadable=unreadable, ensembles=ensembles)

    def _sources(self, unreadable: dict[str, str]) -> Iterator[ModelSource]:
        for name in self._repository.names():
            try:
                yield self._repository.find(name)
            except XlaserveError as error:
                unreadable[name] = str(error)

    def _placed(
        self,
        target: Target,
        devices: Devices,
        versions: tuple[PlannedVersion, ...],
    ) -> DevicePlan:
        limit = usable_bytes(target, self._settings)
        of_each = capacity_bytes(self._settings, limit, devices.count, target.platform)
        of_host = capacity_bytes(self._settings, None, 1)
        capacity = Capacity()
        capacity.limit(dict.fromkeys(devices.names, of_each), of_host)
        loads, resident = _loaded([one for one in versions if one.reserved], capacity)
        largest = max((one.predicted_bytes for one in versions), default=0)
        mesh, problem = 0, ""
        try:
            mesh = RuntimeLimits.of(self._settings, of_each, largest).capacity_bytes
        except InvalidSettings as error:
            problem = str(error)
        return DevicePlan(
            target,
            devices.count,
            of_each,
            versions,
            loads=loads,
            resident=resident,
            mesh_capacity_bytes=mesh,
            mesh_problem=problem,
        )


def usable_bytes(target: Target, settings: Settings) -> int | None:
    """Return the bytes of one device that are available to XLA; None for host memory."""
    if target.platform == "cuda":
        return int(settings.gpu_memory_fraction * target.memory_bytes)
    return target.memory_bytes or None


def _predicted(
    source: ModelSource, version: VersionSource, done: Compiled, devices: Devices
) -> Sizes:
    # As in a server, which has already imported JAX when ModelMesh asks.
    loaders.begin_estimating()
    try:
        return loaders.predict_size(version.directory, source.config, devices, version.roots)
    except InvalidModel:
        return {}


def _loaded(
    versions: Sequence[PlannedVersion], capacity: Capacity
) -> tuple[tuple[PlannedLoad, ...], tuple[str, ...]]:
    """Simulate the loads in order, evicting the oldest models when memory is short."""
    held: dict[str, Reservation] = {}
    loads: list[PlannedLoad] = []
    for one in versions:
        key = f"{one.name}/{one.version}"
        reservation = Reservation(capacity, key)
        needed = greatest(one.predicted, one.reserved)
        missing = reservation.missing(needed)
        holders = [(other, found.sizes) for other, found in held.items()]
        evicted = tuple(first_to_give(holders, missing)) if missing else ()
        for other in evicted:
            held.pop(other).release()
        try:
            reservation.set(needed)
        except OutOfMemory as error:
            loads.append(PlannedLoad(one.name, one.version, evicted, str(error)))
            continue
        reservation.correct(one.reserved)
        held[key] = reservation
        loads.append(PlannedLoad(one.name, one.version, evicted))
    return tuple(loads), tuple(held)
