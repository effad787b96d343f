"""Lists the models and versions whose last load failed, with the reason."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from xlaserve.residence.failed_loads import SHOWN, is_failure, named_models
from xlaserve.residence.lifecycle import State
from xlaserve.residence.registry import Registry
from xlaserve.serving.access.sight import seen_now


@dataclass(frozen=True, slots=True)
class Failing:
    """A version that failed to load, or a model that failed before a version was known."""

    name: str
    version: str
    """Version number; empty if no version is known."""
    reason: str
    """The reason shown in the repository index."""


def failing(registry: Registry, name: str) -> Iterator[Failing]:
    """Yield the failed versions of a model, or the model itself if it failed without one."""
    model = registry.find(name)
    if model is None or not model.versions:
        reason = registry.failed.reason(name)
        if reason:
            yield Failing(name, "", reason)
        return
    for version in sorted(model.versions.values(), key=lambda one: int(one.number)):
        state, reason = registry.shown_state(version)
        if is_failure(state, reason):
            yield Failing(name, version.number, reason)


def describe_failures(registry: Registry, names: Iterable[str]) -> str:
    """Summarize in one line which of these models do not answer, and why.

    Names only models that the current caller may see.
    """
    sees = seen_now()
    missing = [name for name in names if not registry.ready(name)]
    shown = [one for name in missing if sees(name) for one in failing(registry, name)]
    lines = [_named(one) for one in shown[:SHOWN]]
    if len(shown) > SHOWN:
        lines.append(f"and {len(shown) - SHOWN} more")
    counted = f"{len(missing)} model{'' if len(missing) == 1 else 's'} of the start"
    return f"{counted} not loaded" + (f": {'; '.join(lines)}" if lines else "")


def describe_loading(registry: Registry) -> str:
    """Name the models that are being loaded and that the current caller may see."""
    sees = seen_now()
    return named_models(
        [
            model.name
            for model in registry.models()
            if sees(model.name)
            and any(version.state is State.LOADING for version in model.versions.values())
        ]
    )


def _named(one: Failing) -> str:
    version = f" version {one.version}" if one.version else ""
    return f"'{one.name}'{version}: {one.reason}"
