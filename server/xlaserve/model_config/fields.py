"""The table of all model configuration fields: obeyed, refused or without effect.

A field that is not obeyed is refused where a client would get another answer, or another error,
than the configuration asks for. Any other has no effect, and the log names it with the load. A
default that is written out asks for nothing.
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
"""Limit of named fields without effect."""


class Effect(Enum):
    """The server's treatment of a field."""

    OBEYED = auto()
    REFUSED = auto()
    NONE = auto()
    """Answers are the same without it."""


_Files: TypeAlias = Callable[[Any], Iterable[str]]
"""Returns the files that a value names."""

_Asks: TypeAlias = Callable[[Any, betterproto.Message], bool]
"""Tells whether a value other than the default has an effect."""


@dataclass(frozen=True, slots=True)
class Row:
    """Treatment of one field. A field that is not obeyed covers all fields inside it."""

    effect: Effect
    because: str = ""
    """Reason of a refusal: the difference, and a remedy."""
    asks: _Asks = lambda value, message: True
    files: _Files | None = None
    """Files named in the value; a client may name the model's own alone."""


_OBEYED = Row(Effect.OBEYED)
_NONE = Row(Effect.NONE)
_TENSOR = "the model would be given, or give, other tensors"


def _named(files: _Files = lambda value: (value,)) -> Row:
    """Return the row of an obeyed field that names files."""
    return Row(Effect.OBEYED, files=files)


def _refused(because: str, asks: _Asks = lambda value, message: True) -> Row:
    return Row(Effect.REFUSED, because, asks)


CHECKSUM = "checksum"
"""The name of the one agent of a model repository."""

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
        # For computations; code is handed requests one by one, in a list, and sees their shapes.
        "batch_input": _OBEYED,
        "batch_input.kind": _OBEYED,
        "batch_input.target_name": _OBEYED,
        "batch_input.data_type": _OBEYED,
        "batch_input.source_input": _OBEYED,
        "batch_output": _OBEYED,
        "batch_output.kind": _OBEYED,
        "batch_output.target_name": _OBEYED,
        "batch_output.source_input": _OBEYED,
        # --- where it runs, and from what ---
        "instance_group": _OBEYED,
        "instance_group.name": _NONE,
        "instance_group.count": _OBEYED,
        "instance_group.gpus": _OBEYED,
        "instance_group.kind": _OBEYED,
        "instance_group.profile": _NONE,
        "instance_group.rate_limiter": _NONE,
        "instance_group.passive": _refused("no instance is kept from answering"),
        "instance_group.secondary_devices": _NONE,
        "instance_group.host_policy": _NONE,
        "default_model_filename": _named(),
        # On devices without a compute capability the log names it.
        "cc_model_filenames": _named(lambda value: value.values()),
        "model_operations": _OBEYED,
        "model_operations.op_library_filename": _refused("no library is loaded"),
        "model_repository_agents": _OBEYED,
        "model_repository_agents.agents": _OBEYED,
        "model_repository_agents.agents.name": _refused(
            "the only agent is 'checksum'", lambda value, message: value != CHECKSUM
        ),
        # `MD5:file` and the sum.
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
        # Each replica answers its batches one after the other, in the order of their requests.
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
        # The states of all sequences lie in one array, which is updated in place.
        "sequence_batching.state.use_same_buffer_for_input_output": _OBEYED,
        # The dims of a state are fixed, so that none grows.
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
        # --- the rest ---
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
"""Rows by path. A newcomer of `protos/model_config.proto` needs one, or the tests fail."""

CONTENT_TYPE = "content_type"
"""Parameter for the content type of all tensors; `content_type.x` sets that of tensor x."""

EXECUTE_DELAY = "execute_delay_ms"
"""The parameter that says how long an execution of an identity model takes."""

STRICT_OUTPUTS = "strict_outputs"
"""Parameter: a Triton Python model refuses undescribed outputs."""

DEFAULT = "default."
"""The parameter with the default of an optional input begins so, before the name of the input."""

PARAMETERS: Mapping[str, Effect] = MappingProxyType(
    {
        **dict.fromkeys(
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
                *(
                    "slots",
                    "length",
                    "windows",
                    "step_sizes",
                    "prefix_cache",
                    "chunk",
                    "grammars",
                    "tool_calls",
                    "text",
                ),
                CONTENT_TYPE,
            ),
            Effect.OBEYED,
        ),
        # What the server says of a model; it may be sent back.
        "batch_rows": Effect.NONE,
    }
)
"""Known entries of `parameters`; entries for other servers have no effect."""


_KINDS = ("platform", "backend")
_CODE = "python"
_ONNX = frozenset({"onnxruntime", "onnxruntime_onnx"})


def is_onnx(kind: str) -> bool:
    """Tell whether a `platform` or `backend` means ONNX, which is imported here."""
    return kind in _ONNX


def without_effect(message: inference.ModelConfig) -> tuple[str, ...]:
    """Return the first few given fields without effect, by path.

    Raises BadConfig for one that is refused.
    """
    # A dict: a field of many tensors is named once.
    found = dict.fromkeys(_without_effect(message, ""))
    kinds = [getattr(message, kind) for kind in _KINDS]
    defaults = {f"{DEFAULT}{tensor.name}" for tensor in message.input if tensor.optional}
    for name in message.parameters:
        # What others mean by it, the code of a Python model reads.
        known = CONTENT_TYPE if name.startswith(f"{CONTENT_TYPE}.") else name
        is_obeyed = PARAMETERS.get(known) is Effect.OBEYED or name in defaults
        if not is_obeyed and _CODE not in kinds:
            found[f"parameters[{shown(name)}]"] = None
    found |= dict.fromkeys(
        f"{name} ({kind})" for name, kind in zip(_KINDS, kinds, strict=True) if is_onnx(kind)
    )
    is_unbatched = not message.max_batch_size and "max_batch_size" in given_of(message)
    is_unbatched |= message.model_transaction_policy.decoupled
    is_unbatched |= "identity" in kinds and EXECUTE_DELAY not in message.parameters
    if is_unbatched and _only_batches(message):
        found["dynamic_batching"] = None  # no request waits for another
    if message.model_warmup and _scheduling(message) in _NOT_WARMED:
        found["model_warmup"] = None
    if message.response_cache.enable and _scheduling(message) == "ensemble_scheduling":
        # A step that is loaded again would give other answers: each step has a cache of its own.
        found["response_cache.enable"] = None
    names = list(found)
    if len(names) > SHOWN_FIELDS:
        names[SHOWN_FIELDS:] = [f"and {len(names) - SHOWN_FIELDS} more"]
    return tuple(names)


_NOT_WARMED = frozenset({"ensemble_scheduling", "sequence_batching"})
"""An ensemble's steps are warmed by themselves; a sequence would have to begin and end."""


def _only_batches(message: inference.ModelConfig) -> bool:
    """Tell whether dynamic batching is its only request: no queue policy."""
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
    """Return each file named in a configuration, with the path of its field."""
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
    """Return the value of a field; None for a default."""
    # Not by getattr, which would make a message for each field that is not there.
    value = vars(message).get(field.attribute, betterproto.PLACEHOLDER)
    if value is betterproto.PLACEHOLDER:
        return None
    if field.oneof and betterproto.which_one_of(message, field.oneof)[0] != field.attribute:
        return None
    if isinstance(value, betterproto.Message):
        return value if betterproto.serialized_on_wire(value) else None
    # A member of an oneof is chosen, whatever its value.
    return value if value or field.oneof else None


def _inside(field: Field, value: Any) -> Iterable[tuple[str, betterproto.Message]]:
    """Return the messages of a field, each with its path."""
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
