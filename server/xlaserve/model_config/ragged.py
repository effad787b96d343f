"""Ragged batching: the `batch_input` and `batch_output` of a configuration."""

from dataclasses import dataclass
from enum import Enum

from xlaserve.model_config.schema import BadConfig, shown
from xlaserve.tensors import BY_CONFIG_NAME, DATATYPES, Datatype
from xlaserve_proto import inference


class BatchKind(Enum):
    """The property of the source input that a batch input contains (BatchInput.Kind)."""

    ELEMENT_COUNT = "BATCH_ELEMENT_COUNT"
    ACCUMULATED = "BATCH_ACCUMULATED_ELEMENT_COUNT"
    ACCUMULATED_WITH_ZERO = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    MAX_AS_SHAPE = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    ITEM_SHAPE = "BATCH_ITEM_SHAPE"
    ITEM_SHAPE_FLATTEN = "BATCH_ITEM_SHAPE_FLATTEN"


@dataclass(frozen=True, slots=True)
class BatchInput:
    """An additional model input that the server computes for each batch."""

    kind: BatchKind
    name: str
    datatype: Datatype
    source: str
    """The client's input from which this input is computed."""


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """An output that is split among requests in proportion to the sizes of their input `source`."""

    name: str
    source: str


_DATATYPES = (DATATYPES["INT32"], DATATYPES["FP32"])


def batch_inputs_of(message: inference.ModelConfig) -> tuple[BatchInput, ...]:
    """Return the batch inputs, one per target name. Raises BadConfig."""
    known = [tensor.name for tensor in message.input]
    found = []
    for index, given in enumerate(message.batch_input):
        place = f"batch_input[{index}]"
        datatype = BY_CONFIG_NAME.get(given.data_type.name or "")
        if datatype not in _DATATYPES:
            raise _unfit(f"{place}.data_type", "TYPE_INT32 or TYPE_FP32", str(given.data_type.name))
        source = _source(place, given.source_input, known)
        kind = BatchKind(str(given.kind.name))
        names = _targets(place, given.target_name)
        found += [BatchInput(kind, name, datatype, source) for name in names]
    return tuple(found)


def batch_outputs_of(message: inference.ModelConfig) -> tuple[BatchOutput, ...]:
    """Return the batch outputs, one per target name. Raises BadConfig."""
    known = [tensor.name for tensor in message.input]
    found = []
    for index, given in enumerate(message.batch_output):
        place = f"batch_output[{index}]"
        source = _source(place, given.source_input, known)
        found += [BatchOutput(name, source) for name in _targets(place, given.target_name)]
    return tuple(found)


def _source(place: str, names: list[str], known: list[str]) -> str:
    if len(names) != 1:
        raise _unfit(f"{place}.source_input", "one input", str(len(names)))
    if names[0] not in known:
        raise _unfit(f"{place}.source_input", "an input of the configuration", shown(names[0]))
    return names[0]


def _targets(place: str, names: list[str]) -> list[str]:
    if not names or not all(names):
        raise _unfit(f"{place}.target_name", "at least one name", "none")
    return names


def _unfit(place: str, expected: str, got: str) -> BadConfig:
    return BadConfig.mismatch(expected, got).within(place)
