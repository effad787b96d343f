"""Models of a platform that controls loading: ModelMesh or SageMaker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from xlaserve.concurrency.in_turns import in_turns
from xlaserve.residence.capacity import Capacity
from xlaserve.residence.lifecycle import State
from xlaserve.residence.platforms.multi_model import MultiModelContainer
from xlaserve.residence.platforms.runtime import ModelRuntime, RuntimeLimits
from xlaserve.residence.registry import Model, Registry
from xlaserve.serving.access.sight import Sees

MAX_HOSTED = 1000
"""Maximum number of models per reading; the largest are kept."""


class Platform(StrEnum):
    """Platforms that control which models a server loads."""

    NONE = ""
    MODELMESH = "ModelMesh"
    SAGEMAKER = "SageMaker"


@dataclass(frozen=True, slots=True)
class HostedReading:
    """A loaded model, as the platform's page shows it."""

    name: str
    held_bytes: int
    """Memory of all loaded versions."""
    told_bytes: int | None
    """The size reported to the mesh, or None if none was reported."""
    url: str
    """The model's URL or directory; empty with ModelMesh."""
    loaded_at_ns: int
    """When the model's last load ended, in ns since the epoch; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class LoadReading:
    """A load in progress."""

    name: str
    version: str
    stage: str
    """The progress of the load."""


@dataclass(frozen=True, slots=True)
class HostingReading:
    """The models and loads of the platform at one moment."""

    platform: Platform
    limits: RuntimeLimits | None
    """Limits reported in the last call of the mesh; None before the first, or without a mesh."""
    untold_bytes: int
    """Model memory in excess of the sizes reported to the mesh."""
    used_bytes: int
    """Memory held by models or reserved for them."""
    total_bytes: int | None
    """Memory available to models; None while it is unknown."""
    model_count: int
    """Number of loaded models; `models` may list fewer."""
    models: Sequence[HostedReading]
    """Largest first."""
    loading: Sequence[LoadReading]
    missing: Mapping[str, str] = field(default_factory=dict)
    """Processes that did not answer -> the reason."""


class HostingBoard:
    """Reads the models that a platform has loaded. Used from the event loop only."""

    def __init__(
        self,
        registry: Registry,
        capacity: Capacity,
        *,
        mesh: ModelRuntime | None = None,
        container: MultiModelContainer | None = None,
    ) -> None:
        """`mesh` is set with ModelMesh, and `container` with SageMaker."""
        self._registry = registry
        self._capacity = capacity
        self._mesh = mesh
        self._container = container

    @property
    def platform(self) -> Platform:
        """Return the platform that controls this server."""
        if self._mesh is not None:
            return Platform.MODELMESH
        return Platform.NONE if self._container is None else Platform.SAGEMAKER

    async def read(self) -> HostingReading:
        """Return loaded models and running loads. Yields to the event loop between models."""
        models: list[HostedReading] = []
        loading: list[LoadReading] = []
        async for model in in_turns(self._registry.models()):
            loading += _loading(model)
            if any(version.instance is not None for version in model.versions.values()):
                models.append(self._hosted(model))
        models.sort(key=lambda one: (-one.held_bytes, one.name))
        mesh = self._mesh
        return HostingReading(
            self.platform,
            None if mesh is None else mesh.limits,
            0 if mesh is None else mesh.unreported_bytes,
            self._capacity.used_bytes,
            self._capacity.total_bytes,
            len(models),
            models[:MAX_HOSTED],
            loading,
        )

    def _hosted(self, model: Model) -> HostedReading:
        loaded = [version for version in model.versions.values() if version.instance is not None]
        return HostedReading(
            model.name,
            sum(one.instance.memory.total_bytes for one in loaded if one.instance is not None),
            None if self._mesh is None else self._mesh.reported_bytes(model.name),
            "" if self._container is None else self._container.hosted(model).url,
            max((one.origin.at_ns for one in loaded if one.origin is not None), default=0),
        )


def _loading(model: Model) -> list[LoadReading]:
    return [
        LoadReading(model.name, version.number, version.lifecycle.reason)
        for version in model.versions.values()
        if version.state in (State.LOADING, State.RELOADING)
    ]


def fold_hosting(
    answers: Mapping[str, HostingReading], missing: Mapping[str, str]
) -> HostingReading:
    """Merge the readings of all workers, adding up memory.

    Only the worker that the mesh called knows the limits and sizes reported to it.
    """
    readings = list(answers.values())
    models: dict[str, HostedReading] = {}
    for one in (model for reading in readings for model in reading.models):
        before = models.get(one.name)
        models[one.name] = one if before is None else _together(before, one)
    totals = [one.total_bytes for one in readings if one.total_bytes is not None]
    return replace(
        readings[0],
        limits=next((one.limits for one in readings if one.limits is not None), None),
        untold_bytes=max(one.untold_bytes for one in readings),
        used_bytes=sum(one.used_bytes for one in readings),
        total_bytes=sum(totals) if len(totals) == len(readings) else None,
        model_count=max(one.model_count for one in readings),
        models=sorted(models.values(), key=lambda one: (-one.held_bytes, one.name))[:MAX_HOSTED],
        loading=list(dict.fromkeys(load for one in readings for load in one.loading)),
        missing=dict(missing),
    )


def hosted_in_sight(reading: HostingReading, sees: Sees) -> HostingReading:
    """Return the part of a reading that a caller with access to some models may see."""
    models = [one for one in reading.models if sees(one.name)]
    return replace(
        reading,
        limits=None,
        untold_bytes=0,
        used_bytes=sum(one.held_bytes for one in models),
        total_bytes=None,
        model_count=len(models),
        models=models,
        loading=[one for one in reading.loading if sees(one.name)],
        missing={},
    )


def _together(one: HostedReading, other: HostedReading) -> HostedReading:
    return replace(
        one,
        held_bytes=one.held_bytes + other.held_bytes,
        told_bytes=other.told_bytes if one.told_bytes is None else one.told_bytes,
        loaded_at_ns=max(one.loaded_at_ns, other.loaded_at_ns),
    )
