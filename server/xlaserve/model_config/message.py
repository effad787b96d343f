"""Converts a configuration message into a ModelConfig, or reports its fault."""

from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType

import betterproto

from xlaserve.model_config.config import (
    Checksum,
    ConfigTensor,
    DynamicBatching,
    EnsembleStep,
    ModelConfig,
    QueuePolicy,
    VersionPolicy,
)
from xlaserve.model_config.ensemble import in_order
from xlaserve.model_config.fields import CHECKSUM, without_effect
from xlaserve.model_config.ragged import batch_inputs_of, batch_outputs_of
from xlaserve.model_config.schema import BadConfig, given_of, shown
from xlaserve.model_config.sequence import sequence_batching_of
from xlaserve.model_config.warmup import samples_of
from xlaserve.tensors import BY_CONFIG_NAME
from xlaserve_proto import inference

ENSEMBLE = "ensemble"
"""Platform name of ensembles."""


MAX_PRIORITY_LEVELS = 1000
"""Maximum number of priority levels, because the queue scans all levels for each batch."""


def config_of(message: inference.ModelConfig) -> ModelConfig:
    """Convert a message into a ModelConfig. Raises BadConfig."""
    if message.max_batch_size < 0:
        raise _unfit("max_batch_size", "0 or more", message.max_batch_size)
    inputs = _tensors("input", message.input)
    outputs = _tensors("output", message.output)
    _check_reshapes(message, (*inputs, *outputs))
    return ModelConfig(
        name=message.name,
        platform=message.platform,
        backend=message.backend,
        default_model_filename=message.default_model_filename,
        cc_model_filenames=MappingProxyType(dict(message.cc_model_filenames)),
        max_batch_size=message.max_batch_size,
        is_unbatched=not message.max_batch_size and "max_batch_size" in given_of(message),
        inputs=inputs,
        outputs=outputs,
        version_policy=_version_policy(message.version_policy),
        dynamic_batching=_dynamic_batching(message),
        is_decoupled=message.model_transaction_policy.decoupled,
        warmup=samples_of(message),
        response_cache=_response_cache(message),
        sequence_batching=sequence_batching_of(message),
        steps=_steps(message, inputs, outputs),
        parameters=MappingProxyType(
            {name: value.string_value for name, value in message.parameters.items()}
        ),
        batch_inputs=batch_inputs_of(message),
        batch_outputs=batch_outputs_of(message),
        checksums=tuple(_checksums(message)),
        without_effect=without_effect(message),
        message=message,
    )


def _unfit(place: str, expected: str, got: object) -> BadConfig:
    return BadConfig.mismatch(expected, str(got)).within(place)


def _tensors(
    kind: str, tensors: Sequence[inference.ModelInput | inference.ModelOutput]
) -> tuple[ConfigTensor, ...]:
    found = tuple(_tensor(f"{kind}[{index}]", tensor) for index, tensor in enumerate(tensors))
    _check_names(kind, (tensor.name for tensor in found))
    return found


def _check_names(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise _unfit(f"{kind}[{index}].name", "a unique name", f"{shown(name)} again")
        seen.add(name)


def _tensor(place: str, tensor: inference.ModelInput | inference.ModelOutput) -> ConfigTensor:
    if not tensor.name:
        raise _unfit(f"{place}.name", "a name", "none")
    datatype = BY_CONFIG_NAME.get(tensor.data_type.name or "")
    if datatype is None:
        raise _unfit(f"{place}.data_type", f"one of {', '.join(BY_CONFIG_NAME)}", "none")
    for index, size in enumerate(tensor.dims):
        if size == 0 or size < -1:
            raise _unfit(f"{place}.dims[{index}]", "a size above 0, or -1 for any", size)
    return ConfigTensor(
        tensor.name,
        datatype,
        tuple(tensor.dims),
        _reshape(place, tensor),
        is_optional=isinstance(tensor, inference.ModelInput) and tensor.optional,
        is_ragged=isinstance(tensor, inference.ModelInput) and tensor.allow_ragged_batch,
    )


def _reshape(
    place: str, tensor: inference.ModelInput | inference.ModelOutput
) -> tuple[int, ...] | None:
    """Return the model's shape of a tensor, or None if it equals the clients'."""
    if not betterproto.serialized_on_wire(tensor.reshape):
        return None
    shape = tuple(tensor.reshape.shape)
    for index, size in enumerate(shape):
        if size == 0 or size < -1:
            raise _unfit(f"{place}.reshape.shape[{index}]", "a size above 0, or -1 for any", size)
    if shape == tuple(tensor.dims):
        return None
    if _between_open(shape) != _between_open(tensor.dims):
        expected = (
            f"the number of elements of dims {list(tensor.dims)}, also before, between and after"
            " the dynamic sizes"
        )
        raise _unfit(f"{place}.reshape", expected, list(shape))
    return shape


def _check_reshapes(message: inference.ModelConfig, tensors: Iterable[ConfigTensor]) -> None:
    scheduling, _ = betterproto.which_one_of(message, "scheduling_choice")
    if scheduling == "sequence_batching":
        for tensor in tensors:
            if tensor.reshape is not None:
                because = f"cannot be combined with {scheduling}"
                raise BadConfig(because).within(f"reshape of '{shown(tensor.name)}'")


def _between_open(dims: Iterable[int]) -> list[int]:
    """Return the product of the sizes in each run between dynamic dimensions."""
    products = [1]
    for size in dims:
        if size == -1:
            products.append(1)
        else:
            products[-1] *= size
    return products


def _checksums(message: inference.ModelConfig) -> Iterator[Checksum]:
    """Yield the checksums of the `checksum` agent, whose parameters are `MD5:<file>`: checksum."""
    for index, agent in enumerate(message.model_repository_agents.agents):
        place = f"model_repository_agents.agents[{index}]"
        if not agent.name:
            raise _unfit(f"{place}.name", "'checksum'", "none")
        # The table of fields refuses other agents.
        for key, value in agent.parameters.items() if agent.name == CHECKSUM else ():
            algorithm, _, file = key.partition(":")
            if algorithm.lower() != "md5" or not file:
                raise _unfit(f"{place}.parameters", "MD5:<file>", shown(key))
            yield Checksum(file, value.lower())


def _version_policy(message: inference.ModelVersionPolicy) -> VersionPolicy:
    match betterproto.which_one_of(message, "policy_choice"):
        case ("all", _):
            return VersionPolicy(latest=None)
        case ("latest", inference.ModelVersionPolicyLatest(num_versions=count)):
            return VersionPolicy(latest=count or 1)
        case ("specific", inference.ModelVersionPolicySpecific(versions=versions)):
            return VersionPolicy(latest=None, specific=_specific(versions))
    return VersionPolicy()


def _dynamic_batching(message: inference.ModelConfig) -> DynamicBatching:
    _, batching = betterproto.which_one_of(message, "scheduling_choice")
    if not isinstance(batching, inference.ModelDynamicBatching):
        return DynamicBatching()
    for index, size in enumerate(batching.preferred_batch_size):
        if not 1 <= size <= (message.max_batch_size or size):
            place = f"dynamic_batching.preferred_batch_size[{index}]"
            raise _unfit(place, f"1 to {message.max_batch_size or 'the largest batch'}", size)
    _check_priorities(batching)
    return DynamicBatching(
        tuple(sorted(batching.preferred_batch_size)),
        batching.max_queue_delay_microseconds,
        _queue_policy(batching.default_queue_policy),
        batching.preserve_ordering,
        batching.priority_levels,
        batching.default_priority_level,
        MappingProxyType(
            {n: _queue_policy(policy) for n, policy in batching.priority_queue_policy.items()}
        ),
    )


def _queue_policy(policy: inference.ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        policy.default_timeout_microseconds,
        policy.max_queue_size,
        policy.allow_timeout_override,
        policy.timeout_action is inference.ModelQueuePolicyTimeoutAction.DELAY,
    )


def _check_priorities(batching: inference.ModelDynamicBatching) -> None:
    levels, default = batching.priority_levels, batching.default_priority_level
    if not bool(levels) <= default <= levels:
        expected = f"1 to {levels} (priority_levels)" if levels else "0 without priority_levels"
        raise _unfit("dynamic_batching.default_priority_level", expected, default)
    if levels > MAX_PRIORITY_LEVELS:
        expected = f"at most {MAX_PRIORITY_LEVELS}"
        raise _unfit("dynamic_batching.priority_levels", expected, levels)
    if levels > 1 and batching.preserve_ordering:
        place = "dynamic_batching.priority_levels"
        raise _unfit(place, "at most 1 level with preserve_ordering", levels)
    for level in batching.priority_queue_policy:
        if not 1 <= level <= levels:
            expected = f"a level of 1 to {levels}" if levels else "no level without priority_levels"
            raise _unfit("dynamic_batching.priority_queue_policy", expected, level)


def _response_cache(message: inference.ModelConfig) -> bool:
    if not message.response_cache.enable:
        return False
    scheduling, _ = betterproto.which_one_of(message, "scheduling_choice")
    if scheduling == "sequence_batching":
        because = "its answers depend on earlier requests (sequence_batching)"
    elif message.model_transaction_policy.decoupled:
        because = "it may give several answers to a request (decoupled)"
    else:
        return True
    raise BadConfig(f"is not possible for this model, {because}").within("response_cache.enable")


def _specific(versions: Sequence[int]) -> tuple[int, ...]:
    place = "version_policy.specific.versions"
    if not versions:
        raise _unfit(place, "at least one version", "none")
    for index, version in enumerate(versions):
        if version < 1:
            raise _unfit(f"{place}[{index}]", "a version above 0", version)
    return tuple(versions)


def _steps(
    message: inference.ModelConfig,
    inputs: Sequence[ConfigTensor],
    outputs: Sequence[ConfigTensor],
) -> tuple[EnsembleStep, ...]:
    _, scheduling = betterproto.which_one_of(message, "scheduling_choice")
    if not isinstance(scheduling, inference.ModelEnsembling):
        if message.platform == ENSEMBLE:
            raise _unfit("ensemble_scheduling", "the steps of the ensemble", "none")
        return ()
    _check_ensemble(message, scheduling)
    steps = [
        _step(f"ensemble_scheduling.step[{index}]", step)
        for index, step in enumerate(scheduling.step)
    ]
    try:
        return in_order(steps, (one.name for one in inputs), (one.name for one in outputs))
    except BadConfig as problem:
        raise problem.within("ensemble_scheduling") from None


def _check_ensemble(message: inference.ModelConfig, scheduling: inference.ModelEnsembling) -> None:
    if message.platform not in ("", ENSEMBLE) or message.backend:
        runs = message.backend or message.platform
        raise _unfit("ensemble_scheduling", f'platform "{ENSEMBLE}", no backend', shown(runs))
    # An ensemble has no artifact, so its tensors must be configured.
    for place, given in (
        ("ensemble_scheduling.step", scheduling.step),
        ("input", message.input),
        ("output", message.output),
    ):
        if not given:
            raise _unfit(place, "at least one for an ensemble", "none")


def _step(place: str, step: inference.ModelEnsemblingStep) -> EnsembleStep:
    if not step.model_name:
        raise _unfit(f"{place}.model_name", "the name of a model", "none")
    if step.model_version < -1:
        raise _unfit(f"{place}.model_version", "a version, or -1 for any", step.model_version)
    for name, tensors in (("input_map", step.input_map), ("output_map", step.output_map)):
        if not tensors:
            raise _unfit(f"{place}.{name}", "at least one tensor", "none")
        if not all(tensors.keys()) or not all(tensors.values()):
            raise _unfit(f"{place}.{name}", "names", "an empty name")
    return EnsembleStep(
        step.model_name,
        str(step.model_version) if step.model_version > 0 else "",
        MappingProxyType(step.input_map),
        MappingProxyType(step.output_map),
    )
