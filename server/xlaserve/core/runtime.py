"""The model runtime that a ModelMesh drives: ids, sizes, capacity, and the purge."""

import re
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

from xlaserve.core.capacity import Capacity, MeasuredSizes
from xlaserve.core.control import ModelControl
from xlaserve.core.registry import Registry
from xlaserve.core.repository import Location, Repository
from xlaserve.errors import InvalidSettings, LoadCancelled, ModelNotFound
from xlaserve.settings import Settings

MAX_SIZE_BYTES = (2**31 - 1) * 8192
"""What ModelMesh can count: it rounds up to units of 8 KiB and keeps them in 31 bits."""
MAX_NUMBER = 2**31 - 1
"""The largest of its 32-bit numbers: what is unsigned in a message is signed in the mesh."""

_COMPILED_BYTES = 8 << 20
"""What executables and buffers add to the file of a model of which only the file is known."""

_MAX_CONCURRENCY_PARAMETER = "max_concurrency"
_POSITIVE = re.compile("[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class RuntimeLimits:
    """What ModelMesh is told once, and holds to be constant (ModelMesh SPI, runtimeStatus)."""

    capacity_bytes: int
    loading_concurrency: int
    loading_timeout_ms: int
    default_size_bytes: int
    limit_concurrency: bool

    @classmethod
    def of(cls, settings: Settings, capacity_bytes: int) -> "RuntimeLimits":
        """Check what a mesh container would die of, and refuse it here with a clear text."""
        default = settings.default_model_size_bytes
        needed = max(2 * default, min(512 << 20, 10 * default))
        if capacity_bytes < needed:
            raise InvalidSettings(
                "capacity_bytes",
                f"at least {needed} bytes of memory for models, which ModelMesh demands for a "
                f"default_model_size_bytes of {default} (0 is the memory of the device or of the "
                "container less memory_overhead_bytes)",
                capacity_bytes,
            )
        for name, value, most in (
            ("capacity_bytes", capacity_bytes, MAX_SIZE_BYTES),
            ("load_threads", settings.load_threads, MAX_NUMBER),
            ("model_loading_timeout_ms", settings.model_loading_timeout_ms, MAX_NUMBER),
            ("max_concurrency", settings.max_concurrency, MAX_NUMBER),
        ):
            if value > most:
                raise InvalidSettings(name, f"at most {most}, all that ModelMesh can count", value)
        return cls(
            capacity_bytes,
            settings.load_threads,
            settings.model_loading_timeout_ms,
            default,
            settings.limit_model_concurrency,
        )


@dataclass(frozen=True, slots=True)
class RuntimeModel:
    """What a load, or a question for the size, is about."""

    id: str
    location: Location
    key: Hashable = ""
    """The model key, as it came: part of what names a model besides its path."""
    disk_size_bytes: int = 0
    """What the mesh knows of the files; 0 for nothing."""


@dataclass(frozen=True, slots=True)
class LoadedSize:
    """What a load tells the mesh."""

    size_bytes: int
    max_concurrency: int
    """0 where the mesh does not limit concurrency."""


class ModelRuntime:
    """Loads and unloads models by id; nothing else than the mesh decides what is loaded."""

    def __init__(
        self,
        settings: Settings,
        control: ModelControl,
        registry: Registry,
        repository: Repository,
        capacity: Capacity,
    ) -> None:
        self._settings = settings
        self._control = control
        self._registry = registry
        self._repository = repository
        self._capacity = capacity
        self._sizes = MeasuredSizes()

    async def status(self) -> RuntimeLimits | None:
        """Return the limits once the runtime is ready, None before.

        READY means that nothing is loaded: everything is purged first, whatever was said before. A
        mesh asks only when it starts and knows nothing of what is loaded; and one that lives may
        have loaded models into a runtime that was restarted, without ever asking this one.
        """
        if not self._control.server_ready or self._capacity.smallest_bytes is None:
            return None
        await self._control.purge()
        return RuntimeLimits.of(self._settings, self._capacity.smallest_bytes)

    async def load(self, model: RuntimeModel) -> LoadedSize:
        """Load a model and return when its first request will not compile.

        An id that is held already, from the same files, is no error. Raises LoadFailed,
        OutOfMemory or LoadCancelled (ModelMesh SPI, loadModel).
        """
        find = partial(self._repository.find_at, model.id, model.location)
        await self._control.load_from(model.id, (model.location, model.key), find)
        try:
            size = self.size_bytes(model.id)
        except ModelNotFound:
            raise LoadCancelled(model.id) from None  # unloaded before this could be said
        for known in (model.id, (model.location, model.key)):
            self._sizes.remember(known, size)
        return LoadedSize(size, self._max_concurrency(model.id))

    async def unload(self, model_id: str) -> None:
        """Return once the model is gone and its memory free; an unknown id is no error."""
        await self._control.evict(model_id)

    def size_bytes(self, model_id: str) -> int:
        """Return what a loaded model holds on a device at most, at least 1; raises ModelNotFound.

        A mesh knows one memory. Where it is that of the smallest device, and a model is what it
        holds where it holds most, no device is ever asked for more than it has.
        """
        return min(max(1, self._registry.size_bytes(model_id)), MAX_SIZE_BYTES)

    def predict_size_bytes(self, model: RuntimeModel) -> int:
        """Guess the size of a model at once: no file is looked at.

        What it took before, under its id or from its path; else what its files add up to; else
        the default.
        """
        measured = self._sizes.recall(model.id, (model.location, model.key))
        if measured is not None:
            return measured
        if model.disk_size_bytes:
            return min(model.disk_size_bytes + _COMPILED_BYTES, MAX_SIZE_BYTES)
        return self._settings.default_model_size_bytes

    def _max_concurrency(self, model_id: str) -> int:
        if not self._settings.limit_model_concurrency:
            return 0
        _, instance = self._registry.resolve(model_id)
        asked = _POSITIVE.fullmatch(instance.parameters.get(_MAX_CONCURRENCY_PARAMETER, ""))
        return min(int(asked[0]), MAX_NUMBER) if asked else self._settings.max_concurrency
