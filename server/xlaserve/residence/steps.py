"""Checks whether the steps of a loaded ensemble can answer."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from xlaserve.errors import InvalidModel, LoadFailed, ModelNotFound
from xlaserve.residence.repository.sources import ModelSource
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.access.sight import NOT_IN_REPOSITORY, Sees, step_now
from xlaserve.serving.ensemble import EnsemblePlan


class Stepped(Protocol):
    """A loaded instance, possibly of an ensemble."""

    @property
    def runner(self) -> object:
        """Return the loaded model, or the plan of an ensemble."""
        ...

    @property
    def info(self) -> ModelInfo:
        """Return the description of the model."""
        ...

    @property
    def fault(self) -> str:
        """Return why requests are rejected; empty if they are not."""
        ...

    @property
    def steps(self) -> Sequence[tuple[str, str]]:
        """Return the ensemble's steps: model name and version (empty for the newest version)."""
        ...


Find: TypeAlias = Callable[[str, str], Stepped | None]
"""Returns the instance that serves a model and version, or None."""


def steps_of(instance: Stepped, find: Find) -> Iterator[tuple[str, Stepped | None]]:
    """Yield each step of an ensemble with its instance, including steps of nested ensembles."""
    for name, number in instance.steps:
        step = find(name, number)
        yield name, step
        if step is not None:
            yield from steps_of(step, find)


def missing_step(instance: Stepped, find: Find) -> str | None:
    """Return why an ensemble cannot answer because of its steps; None if it can."""
    found = [instance]
    for name, step in steps_of(instance, find):
        if step is None or step.fault:
            return f"its step {step_now(name)} is not ready"
        found.append(step)
    return next(filter(None, (_misfit(one, find) for one in found)), None)


def is_planned(instance: Stepped, find: Find) -> bool:
    """Tell whether an ensemble's plan matches its loaded steps; True for other models."""
    plan = instance.runner
    return not isinstance(plan, EnsemblePlan) or plan.is_for(_models(plan, find))


def _misfit(instance: Stepped, find: Find) -> str:
    """Return why the loaded steps do not fit an ensemble's plan; empty if they do."""
    plan = instance.runner
    if isinstance(plan, EnsemblePlan):
        try:
            plan.fitted(_models(plan, find))
        except InvalidModel as error:
            reason = f"a step was reloaded with different tensors: {error}"
            for name, _ in plan.models():
                reason = reason.replace(f"'{name}'", step_now(name))
            return reason
    return ""


def _models(plan: EnsemblePlan, find: Find) -> dict[tuple[str, str], ModelInfo]:
    found = {key: find(*key) for key in plan.models()}
    return {key: step.info for key, step in found.items() if step is not None}


def with_steps_in_sight(find: Callable[[], ModelSource], sees: Sees) -> ModelSource:
    """Return the source that `find` returns; raises LoadFailed for an ensemble with hidden steps.

    `sees` tells which models the caller may run: an ensemble must not give access to others. The
    error is the same as for a missing step.
    """
    source = find()
    for step in source.config.steps:
        if not sees(step.model_name):
            missing = ModelNotFound(step.model_name, detail=NOT_IN_REPOSITORY)
            raise LoadFailed(source.name, f"its step failed: {missing}")
    return source
