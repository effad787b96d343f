"""Ensemble plans, validated against the models of their steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Self, TypeAlias

from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ConfigTensor, EnsembleStep, ModelConfig
from xlaserve.model_config.fields import DEFAULT
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.runtime.wrappers.optional_inputs import with_defaults
from xlaserve.runtime.wrappers.reshaping import Reshape
from xlaserve.tensors import Shape, TensorSpec

PLATFORM = "ensemble"


@dataclass(frozen=True, slots=True)
class Interface:
    """The properties of a step's model that a plan depends on."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    optional: frozenset[str]
    has_sequences: bool
    is_decoupled: bool
    is_open: bool
    """Whether the model's outputs may be absent or differ from the declared form."""

    @classmethod
    def of(cls, model: ModelInfo) -> Self:
        """Return the interface of a loaded model."""
        return cls(
            model.inputs,
            model.outputs,
            model.max_batch_size,
            frozenset(model.optional),
            model.has_sequences,
            model.is_decoupled,
            _is_open(model),
        )


Models: TypeAlias = Mapping[tuple[str, str], ModelInfo]
"""The models of the steps, by name and version (an empty version means the newest)."""


class Lead(Enum):
    """Batch dimension added or dropped where a batching model meets one without batches."""

    ADDED = "a batch dimension of 1 is added"
    DROPPED = "its batch dimension of 1 is removed"


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step with the conversions of its inputs."""

    step: EnsembleStep
    leads: Mapping[str, Lead]
    """Conversions by input name; inputs passed on unchanged have none."""
    is_checked: bool
    """Whether inputs must be validated per request, because the plan cannot."""
    is_decoupled: bool


@dataclass(frozen=True, slots=True)
class EnsemblePlan:
    """The steps of an ensemble in topological order."""

    info: ModelInfo
    steps: tuple[PlannedStep, ...]
    leads: Mapping[str, Lead]
    """Conversions of the ensemble's outputs, by name."""
    inputs: Mapping[str, Reshape]
    """Ensemble inputs that the steps take in another shape (`reshape`), by name."""
    outputs: Mapping[str, Reshape]
    config: ModelConfig
    known: Mapping[tuple[str, str], Interface]
    """The interface of each step's model at planning time."""

    def models(self) -> tuple[tuple[str, str], ...]:
        """Return the name and version of every step's model (an empty version means the newest)."""
        return tuple((one.step.model_name, one.step.model_version) for one in self.steps)

    def is_for(self, models: Models) -> bool:
        """Tell whether the steps' models still have the interfaces that the plan was made for."""
        return all(
            key in models and Interface.of(models[key]) == known
            for key, known in self.known.items()
        )

    def fitted(self, models: Models) -> "EnsemblePlan":
        """Return a plan that fits models that may have been reloaded.

        Raises InvalidModel if a model is missing or no longer fits the other steps, or if the
        ensemble's own interface would change. The caller must use the returned plan, since it may
        differ in which outputs of steps may be absent.
        """
        if self.is_for(models):
            return self
        plan = plan_ensemble(self.config, models)
        if _promised(plan.info) != _promised(self.info):
            raise InvalidModel(
                "its steps changed their number of answers, sequence support or optional tensors"
                " since it was loaded: load it again"
            )
        return plan

    def stop(self) -> None:
        """Do nothing: a plan has no compiled programs."""

    def close(self) -> None:
        """Do nothing: the memory belongs to the steps' models."""


def _promised(info: ModelInfo) -> Interface:
    """Return the interface that clients rely on; open outputs are checked per answer."""
    return replace(Interface.of(info), is_open=False)


def _key(step: EnsembleStep) -> tuple[str, str]:
    return step.model_name, step.model_version


def plan_ensemble(config: ModelConfig, described: Models) -> EnsemblePlan:
    """Connect the steps of a configuration; `described` has the models of the steps.

    The configuration guarantees topological order and one producer per tensor. Raises InvalidModel
    if a model lacks a tensor or takes another datatype or shape.
    """
    models = [described[_key(step)] for step in config.steps]
    is_decoupled = any(model.is_decoupled for model in models)
    info = ModelInfo(
        platform=PLATFORM,
        inputs=_specs(config.inputs, config.max_batch_size),
        outputs=_specs(config.outputs, config.max_batch_size),
        max_batch_size=config.max_batch_size,
        # The ensemble's sequence parameters are passed on to its steps.
        has_sequences=any(model.has_sequences for model in models),
        optional=with_defaults(config),
        is_decoupled=is_decoupled,
        is_lenient=any(map(_is_open, models)),
    )
    if not info.inputs or not info.outputs:
        raise InvalidModel("an ensemble's configuration must name its inputs and outputs")
    if config.is_decoupled and not is_decoupled:
        raise InvalidModel(
            "model_transaction_policy.decoupled: expected false, since every step returns one"
            " answer per request, got true"
        )
    tensors = {
        spec.name: _Made(spec, is_batched=bool(info.max_batch_size))
        for spec in _specs(_inner(config.inputs), config.max_batch_size)
    }
    steps = tuple(
        _planned(info, step, described[_key(step)], tensors)
        for step in _apart(config.steps, described)
    )
    leads = {}
    for spec in _specs(_inner(config.outputs), config.max_batch_size):
        lead = _joint("the ensemble", spec, tensors[spec.name], bool(info.max_batch_size))
        if lead is not None:
            leads[spec.name] = lead
    batched = bool(info.max_batch_size)
    return EnsemblePlan(
        info,
        steps,
        leads,
        {
            t.name: Reshape(batched, t.dims, t.reshape)
            for t in config.inputs
            if t.reshape is not None
        },
        {
            t.name: Reshape(batched, t.reshape, t.dims)
            for t in config.outputs
            if t.reshape is not None
        },
        config,
        {_key(step): Interface.of(described[_key(step)]) for step in config.steps},
    )


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor of the plan, as its producer declares it."""

    spec: TensorSpec
    is_batched: bool
    is_open: bool = False
    """Whether the tensor may be absent or differ from its declared form."""


def _is_open(model: ModelInfo) -> bool:
    return model.is_lenient or bool(model.echoes)


def _inner(tensors: Sequence[ConfigTensor]) -> list[ConfigTensor]:
    """Return an ensemble's tensors with the shapes that its steps use."""
    return [t if t.reshape is None else replace(t, dims=t.reshape) for t in tensors]


def _apart(steps: Sequence[EnsembleStep], described: Models) -> Sequence[EnsembleStep]:
    """Reorder the steps: first the ones that do not depend on a decoupled step.

    The other steps are executed once for each response of the decoupled step.
    """
    first, later = [], []
    tensors: set[str] = set()
    for step in steps:
        is_behind = not tensors.isdisjoint(step.input_map.values())
        if is_behind or described[_key(step)].is_decoupled:
            tensors.update(step.output_map.values())
            later.append(step)
        else:
            first.append(step)
    return [*first, *later]


def _specs(tensors: Sequence[ConfigTensor], max_batch_size: int) -> tuple[TensorSpec, ...]:
    batch = (-1,) if max_batch_size else ()
    return tuple(TensorSpec(t.name, t.datatype, (*batch, *t.dims)) for t in tensors)


def _planned(
    info: ModelInfo, step: EnsembleStep, model: ModelInfo, tensors: dict[str, _Made]
) -> PlannedStep:
    """Connect a step's inputs to tensors, and add its outputs to them."""
    if info.max_batch_size > (model.max_batch_size or info.max_batch_size):
        raise InvalidModel(
            f"ensemble step '{step.model_name}': expected max_batch_size of at least "
            f"{info.max_batch_size}, got {model.max_batch_size}"
        )
    is_batched = bool(model.max_batch_size)
    inputs = {spec.name: spec for spec in model.inputs}
    leads = {}
    is_wider = False
    for name, spec in inputs.items():
        tensor = step.input_map.get(name)
        lead = None
        if tensor is not None:
            lead = _joint(step.model_name, spec, tensors[tensor], is_batched)
            is_wider |= not spec.accepts(tensors[tensor].spec.shape)
        if lead is not None:
            leads[name] = lead
        if name not in model.optional:
            _check_given(info, step.model_name, name, tensor)
    _refuse_unknown(step.model_name, "input", step.input_map, inputs)
    outputs = {spec.name: spec for spec in model.outputs}
    _refuse_unknown(step.model_name, "output", step.output_map, outputs)
    is_open = any(tensors[tensor].is_open for tensor in step.input_map.values())
    # An ensemble without batches may pass any number of rows.
    takes_any_rows = is_batched and not info.max_batch_size
    for name, tensor in step.output_map.items():
        tensors[tensor] = _Made(outputs[name], is_batched, _is_open(model))
    return PlannedStep(
        step,
        leads,
        is_checked=is_open or is_wider or bool(leads) or takes_any_rows,
        is_decoupled=model.is_decoupled,
    )


def _check_given(info: ModelInfo, model: str, name: str, tensor: str | None) -> None:
    """Raise InvalidModel if a required input of a step is unmapped or may be absent.

    It may be absent if it is an optional input of the ensemble without a default.
    """
    if tensor is None:
        raise InvalidModel(f"ensemble step '{model}' has no source for input '{name}'")
    if tensor in info.optional and info.optional[tensor] is None:
        raise InvalidModel(
            f"input '{tensor}' of the ensemble is optional, but step '{model}' requires it for"
            f" '{name}': make the step's input optional, or set a default in the parameter"
            f" '{DEFAULT}{tensor}'"
        )


def _refuse_unknown(
    model: str, kind: str, mapped: Mapping[str, str], known: Mapping[str, TensorSpec]
) -> None:
    for name in mapped:
        if name not in known:
            raise InvalidModel(f"ensemble step '{model}' has no {kind} '{name}'")


def _joint(model: str, wanted: TensorSpec, made: _Made, is_batched: bool) -> Lead | None:
    """Return the conversion between producer and consumer; None if the tensor is passed unchanged.

    As in Triton, a model without batches gets or gives a batch of one row. Raises InvalidModel for
    incompatible tensors.
    """
    given = made.spec
    if wanted.datatype is given.datatype:
        if _fits(wanted.shape, given.shape):
            return None
        if is_batched and not made.is_batched and _fits(wanted.shape[1:], given.shape):
            return Lead.ADDED
        if made.is_batched and not is_batched and _fits(wanted.shape, given.shape[1:]):
            return Lead.DROPPED
    raise InvalidModel(
        f"ensemble: '{model}' expects {wanted} for '{wanted.name}', "
        f"tensor '{given.name}' is {given}"
    )


def _fits(wanted: Shape, given: Shape) -> bool:
    return len(wanted) == len(given) and all(
        -1 in (want, have) or want == have for want, have in zip(wanted, given, strict=True)
    )
