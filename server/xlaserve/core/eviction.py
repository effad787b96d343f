"""Which models may go when a load needs their memory."""

from xlaserve.core.ensemble import EnsemblePlan
from xlaserve.core.lifecycle import State
from xlaserve.core.registry import Registry, Version


def to_evict(registry: Registry, needed_bytes: int, *, sparing: str) -> list[Version]:
    """Return idle versions that together give so many bytes back; none if all are not enough.

    Least recently used first. The model `sparing` is for which the room is made. A step of an
    ensemble that answers stays: without it the ensemble would not.
    """
    chosen: list[Version] = []
    freed = 0
    for version in sorted(_idle(registry, sparing), key=_last_use):
        if freed >= needed_bytes:
            break
        chosen.append(version)
        freed += _size(version)
    return chosen if freed >= needed_bytes else []


def _idle(registry: Registry, sparing: str) -> list[Version]:
    steps = _steps(registry)
    return [
        version
        for model in registry.models()
        if model.name != sparing and not model.requests and model.name not in steps
        for version in model.versions.values()
        if version.state is State.READY and _size(version)
    ]


def _steps(registry: Registry) -> set[str]:
    plans = (
        version.instance.runner
        for model in registry.models()
        for version in model.versions.values()
        if version.instance is not None
    )
    return {name for plan in plans if isinstance(plan, EnsemblePlan) for name, _ in plan.models()}


def _size(version: Version) -> int:
    return version.instance.info.memory.total_bytes if version.instance else 0


def _last_use(version: Version) -> int:
    return version.statistics.last_use_ns
