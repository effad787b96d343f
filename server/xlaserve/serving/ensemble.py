"""A model made of other models: its plan, checked against the models that it joins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ConfigTensor, EnsembleStep, ModelConfig
from xlaserve.model_config.fields import DEFAULT
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.runtime.wrappers.optional_inputs import with_defaults
from xlaserve.tensors import TensorSpec

PLATFORM = "ensemble"


@dataclass(frozen=True, slots=True)
class EnsemblePlan:
    """The steps of an ensemble in an order in which each finds its inputs."""

    info: ModelInfo
    steps: tuple[EnsembleStep, ...]

    def models(self) -> tuple[tuple[str, str], ...]:
        """Return name and version (empty for the newest) of every model of a step."""
        return tuple((step.model_name, step.model_version) for step in self.steps)

    def stop(self) -> None:
        """Do nothing: nothing of it is compiled."""

    def close(self) -> None:
        """Do nothing: the models of its steps hold the memory."""


def plan_ensemble(config: ModelConfig, described: Mapping[str, ModelInfo]) -> EnsemblePlan:
    """Join the steps of a configuration; `described` holds what the models of the steps are.

    The configuration has put the steps in order and given each tensor one source. Raises
    InvalidModel where a model has no such tensor, or takes another datatype or shape.
    """
    info = ModelInfo(
        platform=PLATFORM,
        inputs=_specs(config.inputs, config.max_batch_size),
        outputs=_specs(config.outputs, config.max_batch_size),
        max_batch_size=config.max_batch_size,
        # Its steps have the parameters of its requests.
        has_sequences=any(step.has_sequences for step in described.values()),
        optional=with_defaults(config),
    )
    if not info.inputs or not info.outputs:
        raise InvalidModel("an ensemble's configuration must name its inputs and outputs")
    _check_tensors(info, config.steps, described)
    return EnsemblePlan(info, config.steps)


def _specs(tensors: Sequence[ConfigTensor], max_batch_size: int) -> tuple[TensorSpec, ...]:
    batch = (-1,) if max_batch_size else ()
    return tuple(TensorSpec(t.name, t.datatype, (*batch, *t.dims)) for t in tensors)


def _check_tensors(
    info: ModelInfo, steps: Sequence[EnsembleStep], described: Mapping[str, ModelInfo]
) -> None:
    tensors = {spec.name: spec for spec in info.inputs}
    for step in steps:
        model = described[step.model_name]
        if model.is_decoupled:
            raise InvalidModel(
                f"step '{step.model_name}' gives any number of answers to a request, and an "
                "ensemble can take one"
            )
        if info.max_batch_size > (model.max_batch_size or info.max_batch_size):
            raise InvalidModel(
                f"ensemble step '{step.model_name}': expected max_batch_size of at least "
                f"{info.max_batch_size}, got {model.max_batch_size}"
            )
        inputs = {spec.name: spec for spec in model.inputs}
        for name, spec in inputs.items():
            tensor = step.input_map.get(name)
            if tensor is not None:
                _check_joint(step.model_name, spec, tensors[tensor])
            if name not in model.optional:
                _check_given(info, step.model_name, name, tensor)
        _refuse_unknown(step.model_name, "input", step.input_map, inputs)
        outputs = {spec.name: spec for spec in model.outputs}
        _refuse_unknown(step.model_name, "output", step.output_map, outputs)
        for name, tensor in step.output_map.items():
            tensors[tensor] = outputs[name]
    for spec in info.outputs:
        _check_joint("the ensemble", spec, tensors[spec.name])


def _check_given(info: ModelInfo, model: str, name: str, tensor: str | None) -> None:
    """Raise InvalidModel where a step may lack an input that its model needs."""
    if tensor is None:
        raise InvalidModel(f"ensemble step '{model}' leaves out input '{name}'")
    if tensor in info.optional and info.optional[tensor] is None:
        raise InvalidModel(
            f"input '{tensor}' of the ensemble is optional, and step '{model}' needs it for "
            f"'{name}': expected an input that is optional there too, or a default in the "
            f"parameter '{DEFAULT}{tensor}'"
        )


def _refuse_unknown(
    model: str, kind: str, mapped: Mapping[str, str], known: Mapping[str, TensorSpec]
) -> None:
    for name in mapped:
        if name not in known:
            raise InvalidModel(f"ensemble step '{model}' has no {kind} '{name}'")


def _check_joint(model: str, wanted: TensorSpec, given: TensorSpec) -> None:
    fits = len(wanted.shape) == len(given.shape) and all(
        -1 in (want, have) or want == have
        for want, have in zip(wanted.shape, given.shape, strict=True)
    )
    if wanted.datatype is not given.datatype or not fits:
        raise InvalidModel(
            f"ensemble: '{model}' expects {wanted} for '{wanted.name}', "
            f"tensor '{given.name}' is {given}"
        )
