"""Selects the models to evict when a load needs memory."""

from collections.abc import Iterable
from typing import TypeVar

from xlaserve.residence.capacity import Sizes
from xlaserve.residence.lifecycle import State
from xlaserve.residence.registry import Registry, Version

_Holder = TypeVar("_Holder")


def to_evict(registry: Registry, missing: Sizes, *, sparing: str) -> list[Version]:
    """Return idle versions that together free the missing bytes; empty if all are not enough.

    Least recently used first, skipping versions without memory on a device that lacks it. The model
    `sparing`, for which the memory is needed, is never chosen, nor is a step of a loaded ensemble,
    which could not run without it.
    """
    idle = sorted(_idle(registry, sparing), key=_last_use)
    return first_to_give([(version, _sizes(version)) for version in idle], missing)


def first_to_give(holders: Iterable[tuple[_Holder, Sizes]], missing: Sizes) -> list[_Holder]:
    """Return the first holders that together free the missing bytes; empty if even all do not."""
    chosen: list[_Holder] = []
    lacking = dict(missing)
    for holder, sizes in holders:
        given = {device: size for device, size in sizes.items() if device in lacking}
        if not any(given.values()):
            continue
        chosen.append(holder)
        lacking = {d: left for d, need in lacking.items() if (left := need - given.get(d, 0)) > 0}
        if not lacking:
            return chosen
    return []


def next_to_evict(registry: Registry, *, sparing: str) -> list[Version]:
    """Return the least recently used idle version with compiled programs, or an empty list."""
    idle = [v for v in _idle(registry, sparing) if _has_programs(v)]
    return sorted(idle, key=_last_use)[:1]


def _has_programs(version: Version) -> bool:
    return version.instance is not None and bool(version.instance.info.buckets)


def _idle(registry: Registry, sparing: str) -> list[Version]:
    steps = _steps(registry)
    return [
        version
        for model in registry.models()
        if model.name != sparing and not model.requests and model.name not in steps
        for version in model.versions.values()
        if version.state is State.READY
    ]


def _steps(registry: Registry) -> set[str]:
    return {
        name
        for model in registry.models()
        for version in model.versions.values()
        if version.instance is not None
        for name, _ in version.instance.steps
    }


def _sizes(version: Version) -> Sizes:
    return version.instance.reservation.sizes if version.instance else {}


def _last_use(version: Version) -> int:
    return version.statistics.last_use_ns
