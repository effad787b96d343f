"""Reads and validates the `sequence_batching` of a configuration message."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

import betterproto

from xlaserve.model_config.schema import BadConfig, shown
from xlaserve.model_config.sequence_batching import (
    DEFAULT_IDLE_MICROSECONDS,
    Control,
    ControlKind,
    SequenceBatching,
    State,
)
from xlaserve.tensors import BY_CONFIG_NAME, BYTES, DATATYPES, Datatype
from xlaserve_proto import inference

_VALUES = {
    "int32_false_true": DATATYPES["INT32"],
    "fp32_false_true": DATATYPES["FP32"],
    "bool_false_true": DATATYPES["BOOL"],
}
_IDS = tuple(DATATYPES[name] for name in ("INT32", "INT64", "UINT32", "UINT64", "BYTES"))


def sequence_batching_of(message: inference.ModelConfig) -> SequenceBatching | None:
    """Return the sequence batching of a message, or None if it has none. Raises BadConfig."""
    _, batching = betterproto.which_one_of(message, "scheduling_choice")
    if not isinstance(batching, inference.ModelSequenceBatching):
        return None
    try:
        return _read(message, batching)
    except BadConfig as problem:
        raise problem.within("sequence_batching") from None


def _read(
    message: inference.ModelConfig, batching: inference.ModelSequenceBatching
) -> SequenceBatching:
    controls = tuple(
        _control(f".control_input[{index}]", given)
        for index, given in enumerate(batching.control_input)
    )
    states = tuple(_state(f".state[{index}]", given) for index, given in enumerate(batching.state))
    _check_names(message, controls, states)
    found: dict[str, Any] = {
        "idle_microseconds": batching.max_sequence_idle_microseconds or DEFAULT_IDLE_MICROSECONDS,
        "controls": controls,
        "states": states,
        "is_iterative": batching.iterative_sequence,
    }
    _, strategy = betterproto.which_one_of(batching, "strategy_choice")
    if isinstance(strategy, inference.ModelSequenceBatchingStrategyOldest):
        found |= _oldest(message, strategy)
    else:
        found["is_direct"] = True
        if isinstance(strategy, inference.ModelSequenceBatchingStrategyDirect):
            found |= _direct(strategy)
    return SequenceBatching(**found)


def _oldest(
    message: inference.ModelConfig, strategy: inference.ModelSequenceBatchingStrategyOldest
) -> dict[str, Any]:
    if strategy.max_candidate_sequences < 0:
        expected = "0 or more"
        raise _unfit(".oldest.max_candidate_sequences", expected, strategy.max_candidate_sequences)
    most = message.max_batch_size
    for index, size in enumerate(strategy.preferred_batch_size):
        if not 1 <= size <= (most or size):
            place = f".oldest.preferred_batch_size[{index}]"
            raise _unfit(place, f"1 to {most or 'the largest batch'}", size)
    return {
        "max_candidates": strategy.max_candidate_sequences,
        "preferred_batch_size": tuple(sorted(strategy.preferred_batch_size)),
        "max_queue_delay_microseconds": strategy.max_queue_delay_microseconds,
    }


def _direct(strategy: inference.ModelSequenceBatchingStrategyDirect) -> dict[str, Any]:
    part = strategy.minimum_slot_utilization
    if not 0 <= part <= 1:
        raise _unfit(".direct.minimum_slot_utilization", "0 to 1", part)
    return {
        "max_queue_delay_microseconds": strategy.max_queue_delay_microseconds,
        "minimum_slot_utilization": part,
    }


# --- controls ----------------------------------------------------------------------------------


def _control(place: str, given: inference.ModelSequenceBatchingControlInput) -> Control:
    if not given.name:
        raise _unfit(f"{place}.name", "a name", "none")
    if len(given.control) != 1:
        raise _unfit(f"{place}.control", "one control", len(given.control))
    (control,) = given.control
    kind = ControlKind(control.kind.name)
    values = [name for name in _VALUES if getattr(control, name)]
    if kind is ControlKind.CORRID:
        return Control(given.name, kind, _id_datatype(f"{place}.control[0]", control, values))
    if len(values) != 1:
        expected = f"one of {', '.join(_VALUES)}"
        raise _unfit(f"{place}.control[0]", expected, ", ".join(values) or "none")
    false_true: Sequence[float] = getattr(control, values[0])
    if len(false_true) != 2 or not all(map(isfinite, false_true)):
        expected = "two numbers, for false and true"
        raise _unfit(f"{place}.control[0].{values[0]}", expected, list(false_true))
    return Control(given.name, kind, _VALUES[values[0]], tuple(false_true))


def _id_datatype(
    place: str, control: inference.ModelSequenceBatchingControl, values: Sequence[str]
) -> Datatype:
    if values:
        raise _unfit(f"{place}.{values[0]}", "none, since the value is the sequence id", "some")
    datatype = BY_CONFIG_NAME.get(control.data_type.name or "")
    if datatype not in _IDS:
        expected = ", ".join(one.config_name for one in _IDS)
        raise _unfit(f"{place}.data_type", f"one of {expected}", control.data_type.name)
    return datatype


# --- states ------------------------------------------------------------------------------------


def _state(place: str, given: inference.ModelSequenceBatchingState) -> State:
    for name in ("input_name", "output_name"):
        if not getattr(given, name):
            raise _unfit(f"{place}.{name}", "a name", "none")
    datatype = BY_CONFIG_NAME.get(given.data_type.name or "")
    if datatype is None or datatype is BYTES:
        known = ", ".join(name for name, row in BY_CONFIG_NAME.items() if row is not BYTES)
        expected = f"numbers (for texts, a Python model that keeps them), one of {known}"
        raise _unfit(f"{place}.data_type", expected, given.data_type.name)
    for index, size in enumerate(given.dims):
        if size < 1:
            raise _unfit(f"{place}.dims[{index}]", "a size above 0", size)
    if given.use_growable_memory and not given.use_same_buffer_for_input_output:
        place = f"{place}.use_same_buffer_for_input_output"
        raise _unfit(place, "true with use_growable_memory", "false")
    dims = tuple(given.dims)
    if len(given.initial_state) > 1:
        raise _unfit(f"{place}.initial_state", "one at most", len(given.initial_state))
    file = ""
    for initial in given.initial_state:
        file = _initial(f"{place}.initial_state[0]", given, initial)
    return State(given.input_name, given.output_name, datatype, dims, file)


def _initial(
    place: str,
    state: inference.ModelSequenceBatchingState,
    given: inference.ModelSequenceBatchingInitialState,
) -> str:
    """Return the file name of an initial state, or an empty string for zeros."""
    if given.data_type != state.data_type:
        expected = f"{state.data_type.name} like its state"
        raise _unfit(f"{place}.data_type", expected, given.data_type.name)
    if list(given.dims) != list(state.dims):
        raise _unfit(f"{place}.dims", f"{list(state.dims)} like its state", given.dims)
    match betterproto.which_one_of(given, "state_data"):
        case ("data_file", str(file)):
            if not file or "/" in file or file.startswith("."):
                raise _unfit(f"{place}.data_file", "the name of a file", shown(file))
            return file
        case ("zero_data", True):
            return ""
    raise _unfit(place, "zero_data true, or a data_file", "neither")


# --- duplicate names ---------------------------------------------------------------------------


def _check_names(
    message: inference.ModelConfig, controls: Sequence[Control], states: Sequence[State]
) -> None:
    """Raise BadConfig if an input has several sources, or an output belongs to several states."""
    kinds = Counter(control.kind for control in controls)
    for kind, count in kinds.items():
        if count > 1:
            raise _unfit(".control_input", f"one {kind.value}", count)
    seen = Counter(_inputs(message, controls, states))
    seen.update(f"output {shown(state.output_name)}" for state in states)
    for name, count in seen.items():
        if count > 1:
            raise _unfit("", f"one source of {name}", count)


def _inputs(
    message: inference.ModelConfig, controls: Sequence[Control], states: Sequence[State]
) -> Iterator[str]:
    names = [
        *(tensor.name for tensor in message.input),
        *(control.name for control in controls),
        *(state.input_name for state in states),
    ]
    return (f"input {shown(name)}" for name in names)


def _unfit(place: str, expected: str, got: object) -> BadConfig:
    return BadConfig.mismatch(expected, str(got)).within(place)
