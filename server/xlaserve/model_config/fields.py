"""Tells which model configuration fields are obeyed, refused, or have no effect.

A field that is not obeyed is refused if ignoring it would change responses or errors. Otherwise it
has no effect, and is logged with the load. An explicit default value is always accepted.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, TypeAlias

import betterproto

from xlaserve.model_config.compiled_shapes import COMPILED_SHAPES, MAX_ON_DEMAND_SHAPES
from xlaserve.model_config.schema import BadConfig, Field, given_of, schema_of, shown
from xlaserve_proto import inference

SHOWN_FIELDS = 32
"""Maximum number of fields without effect to name."""


class Effect(Enum):
    """How the server treats a field."""

    OBEYED = auto()
    REFUSED = auto()
    NONE = auto()
    """Responses are the same without the field."""


_Files: TypeAlias = Callable[[Any], Iterable[str]]
"""Returns the file names in a field's value."""

_Asks: TypeAlias = Callable[[Any, betterproto.Message], bool]
"""Tells whether a value other than the default would change the server's behavior."""


@dataclass(frozen=True, slots=True)
class Row:
    """How one field is treated; unless it is obeyed, this applies to all fields inside it."""

    effect: Effect
    because: str = ""
    """Reason for refusing the field, and advice."""
    asks: _Asks = lambda value, message: True
    files: _Files | None = None
    """Returns the file names in the value. A client's configuration may only name files of its own
    model."""


_OBEYED = Row(Effect.OBEYED)
_NONE = Row(Effect.NONE)
_TENSOR = "it would change the model's tensors"


def _named(files: _Files = lambda value: (value,)) -> Row:
    """Return the row of an obeyed field that contains file names."""
    return Row(Effect.OBEYED, files=files)


def _refused(because: str, asks: _Asks = lambda value, message: True) -> Row:
    return Row(Effect.REFUSED, because, asks)


CHECKSUM = "checksum"
"""Name of the only supported repository agent."""

FIELDS: Mapping[str, Row] = MappingProxyType(
    {
        "name": _OBEYED,
        "platform": _OBEYED,
        "backend": _OBEYED,
        "runtime": _NONE,
        "version_policy": _OBEYED,
        "version_policy.latest": _OBEYED,
        "version_policy.latest.num_versions": _OBEYED,
        "version_policy.all": _OBEYED,
        "version_policy.specific": _OBEYED,
        "version_policy.specific.versions": _OBEYED,
        "max_batch_size": _OBEYED,
        # --- tensors ---
        "input": _OBEYED,
        "input.name": _OBEYED,
        "input.data_type": _OBEYED,
        "input.format": _OBEYED,
        "input.dims": _OBEYED,
        "input.reshape": _OBEYED,
        "input.reshape.shape": _OBEYED,
        "input.is_shape_tensor": _refused(_TENSOR),
        "input.allow_ragged_batch": _OBEYED,
        "input.optional": _OBEYED,
        "input.is_non_linear_format_io": _refused(_TENSOR),
        "output": _OBEYED,
        "output.name": _OBEYED,
        "output.data_type": _OBEYED,
        "output.dims": _OBEYED,
        "output.label_filename": _named(),
        "output.reshape": _OBEYED,
        "output.reshape.shape": _OBEYED,
        "output.is_shape_tensor": _refused(_TENSOR),
        "output.is_non_linear_format_io": _refused(_TENSOR),
        # Only for computations: Python models get each request with its own shape.
        "batch_input": _OBEYED,
        "batch_input.kind": _OBEYED,
        "batch_input.target_name": _OBEYED,
        "batch_input.data_type": _OBEYED,
        "batch_input.source_input": _OBEYED,
        "batch_output": _OBEYED,
        "batch_output.kind": _OBEYED,
        "batch_output.target_name": _OBEYED,
        "batch_output.source_input": _OBEYED,
        # --- placement and files ---
        "instance_group": _OBEYED,
        "instance_group.name": _NONE,
        "instance_group.count": _OBEYED,
        "instance_group.gpus": _OBEYED,
        "instance_group.kind": _OBEYED,
        "instance_group.profile": _NONE,
        "instance_group.rate_limiter": _NONE,
        "instance_group.passive": _refused("rate limits for instances are not supported"),
        "instance_group.secondary_devices": _NONE,
        "instance_group.host_policy": _NONE,
        "default_model_filename": _named(),
        # Logged as having no effect on devices without a compute capability.
        "cc_model_filenames": _named(lambda value: value.values()),
        "model_operations": _OBEYED,
        "model_operations.op_library_filename": _refused("custom libraries are not loaded"),
        "model_repository_agents": _OBEYED,
        "model_repository_agents.agents": _OBEYED,
        "model_repository_agents.agents.name": _refused(
            "only the agent 'checksum' is supported", lambda value, message: value != CHECKSUM
        ),
        # Keys are `MD5:<file>`, values are checksums.
        "model_repository_agents.agents.parameters": _named(
            lambda value: (key.partition(":")[2] for key in value)
        ),
        # --- scheduling ---
        "dynamic_batching": _OBEYED,
        "dynamic_batching.preferred_batch_size": _OBEYED,
        "dynamic_batching.max_queue_delay_microseconds": _OBEYED,
        "dynamic_batching.preserve_ordering": _OBEYED,
        "dynamic_batching.priority_levels": _OBEYED,
        "dynamic_batching.default_priority_level": _OBEYED,
        "dynamic_batching.default_queue_policy": _OBEYED,
        "dynamic_batching.default_queue_policy.timeout_action": _OBEYED,
        "dynamic_batching.default_queue_policy.default_timeout_microseconds": _OBEYED,
        "dynamic_batching.default_queue_policy.allow_timeout_override": _OBEYED,
        "dynamic_batching.default_queue_policy.max_queue_size": _OBEYED,
        "dynamic_batching.priority_queue_policy": _OBEYED,
        "dynamic_batching.priority_queue_policy.timeout_action": _OBEYED,
        "dynamic_batching.priority_queue_policy.default_timeout_microseconds": _OBEYED,
        "dynamic_batching.priority_queue_policy.allow_timeout_override": _OBEYED,
        "dynamic_batching.priority_queue_policy.max_queue_size": _OBEYED,
        "sequence_batching": _OBEYED,
        "sequence_batching.max_sequence_idle_microseconds": _OBEYED,
        "sequence_batching.control_input": _OBEYED,
        "sequence_batching.control_input.name": _OBEYED,
        "sequence_batching.control_input.control": _OBEYED,
        "sequence_batching.control_input.control.kind": _OBEYED,
        "sequence_batching.control_input.control.int32_false_true": _OBEYED,
        "sequence_batching.control_input.control.fp32_false_true": _OBEYED,
        "sequence_batching.control_input.control.bool_false_true": _OBEYED,
        "sequence_batching.control_input.control.data_type": _OBEYED,
        "sequence_batching.direct": _OBEYED,
        "sequence_batching.direct.max_queue_delay_microseconds": _OBEYED,
        "sequence_batching.direct.minimum_slot_utilization": _OBEYED,
        "sequence_batching.oldest": _OBEYED,
        "sequence_batching.oldest.max_candidate_sequences": _OBEYED,
        "sequence_batching.oldest.preferred_batch_size": _OBEYED,
        "sequence_batching.oldest.max_queue_delay_microseconds": _OBEYED,
        # Always the case: each replica executes its batches in order.
        "sequence_batching.oldest.preserve_ordering": _OBEYED,
        "sequence_batching.state": _OBEYED,
        "sequence_batching.state.input_name": _OBEYED,
        "sequence_batching.state.output_name": _OBEYED,
        "sequence_batching.state.data_type": _OBEYED,
        "sequence_batching.state.dims": _OBEYED,
        "sequence_batching.state.initial_state": _OBEYED,
        "sequence_batching.state.initial_state.data_type": _OBEYED,
        "sequence_batching.state.initial_state.dims": _OBEYED,
        "sequence_batching.state.initial_state.zero_data": _OBEYED,
        "sequence_batching.state.initial_state.data_file": _named(),
        "sequence_batching.state.initial_state.name": _NONE,
        # Always the case: the states of all sequences are in one array, updated in place.
        "sequence_batching.state.use_same_buffer_for_input_output": _OBEYED,
        # States have fixed dims, so they never grow.
        "sequence_batching.state.use_growable_memory": _NONE,
        "sequence_batching.iterative_sequence": _OBEYED,
        "ensemble_scheduling": _OBEYED,
        "ensemble_scheduling.step": _OBEYED,
        "ensemble_scheduling.step.model_name": _OBEYED,
        "ensemble_scheduling.step.model_version": _OBEYED,
        "ensemble_scheduling.step.input_map": _OBEYED,
        "ensemble_scheduling.step.output_map": _OBEYED,
        "ensemble_scheduling.step.model_namespace": _refused("another model might answer"),
        "ensemble_scheduling.max_inflight_requests": _NONE,
        "model_transaction_policy": _OBEYED,
        "model_transaction_policy.decoupled": _OBEYED,
        # --- other ---
        "parameters": _OBEYED,
        "parameters.string_value": _OBEYED,
        "model_warmup": _OBEYED,
        "model_warmup.name": _OBEYED,
        "model_warmup.batch_size": _OBEYED,
        "model_warmup.count": _OBEYED,
        "model_warmup.inputs": _OBEYED,
        "model_warmup.inputs.data_type": _OBEYED,
        "model_warmup.inputs.dims": _OBEYED,
        "model_warmup.inputs.zero_data": _OBEYED,
        "model_warmup.inputs.random_data": _OBEYED,
        "model_warmup.inputs.input_data_file": _named(),
        "optimization": _NONE,
        "metric_tags": _NONE,
        "model_metrics": _NONE,
        "response_cache": _OBEYED,
        "response_cache.enable": _OBEYED,
    }
)
"""Treatment of each field by path. Tests fail if a field of `protos/model_config.proto` is missing.
"""

CONTENT_TYPE = "content_type"
"""Name of the parameter with the default content type; `content_type.x` is for tensor x."""

EXECUTE_DELAY = "execute_delay_ms"
"""Name of the parameter with the execution time of an identity model."""

STRICT_OUTPUTS = "strict_outputs"
"""Name of the parameter that makes a Triton Python model's undescribed outputs errors."""

DEFAULT = "default."
"""Prefix of the parameters with the defaults of optional inputs; the input's name follows."""

PARAMETERS = frozenset(
    (
        EXECUTE_DELAY,
        *("batch_sizes", "batch_independent", COMPILED_SHAPES, MAX_ON_DEMAND_SHAPES),
        "split_batches",
        *("devices", "placement", "mesh", "partition"),
        *("execution", STRICT_OUTPUTS),
        *("image_channel_order", "image_scale", "image_mean", "image_std"),
        *("image_resize", "image_resize_to", "image_sampling", "image_pad"),
        *("image_orientation", "max_concurrency", "max_steps"),
        "embeddings",
        *("slots", "length", "windows", "step_sizes", "prefix_cache", "chunk"),
        *("grammars", "tool_calls", "text"),
        CONTENT_TYPE,
        # Reported by the server; clients that send a configuration back are not warned about it.
        "batch_rows",
    )
)
"""Known entries of `parameters`; all others have no effect."""


_KINDS = ("platform", "backend")
_CODE = "python"
_ONNX = frozenset({"onnxruntime", "onnxruntime_onnx"})


def is_onnx(kind: str) -> bool:
    """Tell whether a `platform` or `backend` means an ONNX model, which is converted."""
    return kind in _ONNX


def without_effect(message: inference.ModelConfig) -> tuple[str, ...]:
    """Return the paths of configured fields that have no effect, up to `SHOWN_FIELDS`.

    Raises BadConfig if a field is refused.
    """
    # A dict, because a field may occur for many tensors.
    found = dict.fromkeys(_without_effect(message, ""))
    kinds = [getattr(message, kind) for kind in _KINDS]
    defaults = {f"{DEFAULT}{tensor.name}" for tensor in message.input if tensor.optional}
    for name in message.parameters:
        # The code of a Python model may read any other parameter.
        known = CONTENT_TYPE if name.startswith(f"{CONTENT_TYPE}.") else name
        if known not in PARAMETERS and name not in defaults and _CODE not in kinds:
            found[f"parameters[{shown(name)}]"] = None
    found |= dict.fromkeys(
        f"{name} ({kind})" for name, kind in zip(_KINDS, kinds, strict=True) if is_onnx(kind)
    )
    is_unbatched = not message.max_batch_size and "max_batch_size" in given_of(message)
    is_unbatched |= message.model_transaction_policy.decoupled
    is_unbatched |= "identity" in kinds and EXECUTE_DELAY not in message.parameters
    if is_unbatched and _only_batches(message):
        found["dynamic_batching"] = None  # requests are never batched
    if message.model_warmup and _scheduling(message) in _NOT_WARMED:
        found["model_warmup"] = None
    if message.response_cache.enable and _scheduling(message) == "ensemble_scheduling":
        # Not cached as a whole, since a step may be reloaded; each step has its own cache.
        found["response_cache.enable"] = None
    names = list(found)
    if len(names) > SHOWN_FIELDS:
        names[SHOWN_FIELDS:] = [f"and {len(names) - SHOWN_FIELDS} more"]
    return tuple(names)


_NOT_WARMED = frozenset({"ensemble_scheduling", "sequence_batching"})
"""The steps of an ensemble are warmed up themselves; a sequence would need a start and an end."""


def _only_batches(message: inference.ModelConfig) -> bool:
    """Tell whether dynamic batching is configured without policies, priorities and ordering."""
    _, batching = betterproto.which_one_of(message, "scheduling_choice")
    if not isinstance(batching, inference.ModelDynamicBatching):
        return False
    policy = betterproto.serialized_on_wire(batching.default_queue_policy)
    return not (batching.priority_levels or batching.preserve_ordering or policy)


def _scheduling(message: inference.ModelConfig) -> str:
    return betterproto.which_one_of(message, "scheduling_choice")[0]


def _without_effect(message: betterproto.Message, path: str) -> Iterator[str]:
    for field in schema_of(type(message)).by_name.values():
        value = _given(message, field)
        if value is None:
            continue
        name = f"{path}{field.name}"
        row = FIELDS[name]
        if row.effect is Effect.OBEYED:
            for place, inner in _inside(field, value):
                try:
                    yield from _without_effect(inner, f"{name}.")
                except BadConfig as problem:
                    raise problem.within(f".{field.name}{place}") from None
        elif row.asks(value, message):
            if row.effect is Effect.REFUSED:
                raise BadConfig(f"is not implemented, {row.because}", f".{field.name}")
            yield name


def named_files(message: betterproto.Message) -> Iterator[tuple[str, str]]:
    """Return the file names in a configuration, each with the path of its field."""
    return _named_files(message, "")


def _named_files(message: betterproto.Message, path: str) -> Iterator[tuple[str, str]]:
    for field in schema_of(type(message)).by_name.values():
        value = _given(message, field)
        row = FIELDS.get(f"{path}{field.name}")
        if value is None or row is None:
            continue
        if row.files is not None:
            yield from ((f"{path}{field.name}", file) for file in row.files(value))
        for _, inner in _inside(field, value):
            yield from _named_files(inner, f"{path}{field.name}.")


def _given(message: betterproto.Message, field: Field) -> Any:
    """Return the value of a field, or None if it has its default."""
    # Unlike getattr, this does not create a message for a missing field.
    value = vars(message).get(field.attribute, betterproto.PLACEHOLDER)
    if value is betterproto.PLACEHOLDER:
        return None
    if field.oneof and betterproto.which_one_of(message, field.oneof)[0] != field.attribute:
        return None
    if isinstance(value, betterproto.Message):
        return value if betterproto.serialized_on_wire(value) else None
    # A member of a oneof is set even if it has its default value.
    return value if value or field.oneof else None


def _inside(field: Field, value: Any) -> Iterable[tuple[str, betterproto.Message]]:
    """Return the messages in a field, each with its path."""
    if not field.message:
        return ()
    if field.kind == "map":
        entries = ((f"[{shown(str(key))}]", entry) for key, entry in value.items())
        return (
            (place, entry) for place, entry in entries if isinstance(entry, betterproto.Message)
        )
    if field.repeated:
        return ((f"[{index}]", entry) for index, entry in enumerate(value))
    return (("", value),)
