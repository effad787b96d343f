"""The request parameters that the server knows: obeyed, or accepted without effect.

The protocol permits arbitrary parameters. Those that it or Triton defines have a row here; an
invalid value of one is refused, even if the parameter has no effect.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import structlog

from xlaserve.errors import InvalidParameter, InvalidTensor
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.fields import CONTENT_TYPE, Effect
from xlaserve.runtime.handling import NO_TENSOR_PARAMETERS, TensorParameters
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.inference import InferRequest
from xlaserve.tensors import Parameter
from xlaserve.tensors.content_types import CONTENT_TYPES, DATA_FRAME

MAX_NAMED = 32
"""Maximum number of ignored parameters named in the log, per loaded model version."""

_SHOWN_CHARACTERS = 80
_RESERVED_PREFIX = "triton_"


@dataclass(frozen=True, slots=True)
class Kind:
    """The valid values of a parameter."""

    expected: str
    fits: Callable[[Parameter], bool]


@dataclass(frozen=True, slots=True)
class Row:
    """A known parameter: its values and its effect."""

    kind: Kind
    effect: Effect = Effect.NONE


_BOOLEAN = Kind("true or false", lambda value: type(value) is bool)
_COUNT = Kind("an integer of 0 or more", lambda value: type(value) is int and value >= 0)
_SEQUENCE_ID = Kind(
    "a string, or an integer of 0 or more",
    lambda value: isinstance(value, str) or _COUNT.fits(value),
)
_NO_PRIORITY = Kind(
    "0, since the model has no priority_levels", lambda value: type(value) is int and not value
)
_TEXT = Kind("a string", lambda value: isinstance(value, str))

Table: TypeAlias = Mapping[str, Row]

_OF_TENSORS: Table = {
    "shared_memory_region": Row(_TEXT, Effect.OBEYED),
    "shared_memory_byte_size": Row(_COUNT, Effect.OBEYED),
    "shared_memory_offset": Row(_COUNT, Effect.OBEYED),
}

REQUEST: Table = MappingProxyType(
    {
        # Obeyed by models with sequence_batching.
        "sequence_id": Row(_SEQUENCE_ID),
        "sequence_start": Row(_BOOLEAN),
        "sequence_end": Row(_BOOLEAN),
        # Obeyed by models with priority_levels or allow_timeout_override, and by ensembles.
        "priority": Row(_COUNT),
        "timeout": Row(_COUNT),
        # For streams; elsewhere every answer is final and has tensors.
        "triton_enable_empty_final_response": Row(_BOOLEAN, Effect.OBEYED),
        "binary_data_output": Row(_BOOLEAN, Effect.OBEYED),
    }
)
SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
"""Parameters obeyed by models with sequences."""

INPUT: Table = MappingProxyType({**_OF_TENSORS, "binary_data_size": Row(_COUNT, Effect.OBEYED)})
OUTPUT: Table = MappingProxyType(
    {
        **_OF_TENSORS,
        "binary_data": Row(_BOOLEAN, Effect.OBEYED),
        # 0 means that no classification is requested.
        "classification": Row(_COUNT, Effect.OBEYED),
    }
)


def obeyed_by(config: ModelConfig, info: ModelInfo) -> Table:
    """Return the rows of the parameters that this model obeys in addition to the common ones."""
    batching = config.dynamic_batching
    policies = (batching.default_queue_policy, *batching.priority_queue_policy.values())
    rows = {}
    if info.has_sequences:
        rows = {name: Row(REQUEST[name].kind, Effect.OBEYED) for name in SEQUENCE}
    if config.is_ensemble:
        # An ensemble passes these parameters to its steps.
        rows["priority"] = rows["timeout"] = Row(_COUNT, Effect.OBEYED)
    if info.generation is not None:
        # Without this row it would be ignored silently, since a generator takes arbitrary
        # parameters.
        rows["priority"] = Row(_NO_PRIORITY, Effect.OBEYED)
    if levels := batching.priority_levels:
        within = Kind(f"0 to {levels}", lambda value: _COUNT.fits(value) and value <= levels)  # type: ignore[operator]
        rows["priority"] = Row(within, Effect.OBEYED)
    is_stepped = info.is_decoupled and not info.takes_parameters
    if is_stepped or any(policy.allow_timeout_override for policy in policies):
        rows["timeout"] = Row(_COUNT, Effect.OBEYED)
    return rows


def check_request(parameters: Mapping[str, Parameter], table: Table = REQUEST) -> None:
    """Raise an InvalidRequest for an invalid or reserved request parameter."""
    for name, value in parameters.items():
        row = table.get(name)
        if row is None and name.startswith(_RESERVED_PREFIX):
            raise InvalidParameter(
                name[:_SHOWN_CHARACTERS],
                f"a name that does not start with '{_RESERVED_PREFIX}'",
                _shown(value),
            )
        if row is not None and not row.kind.fits(value):
            raise InvalidParameter(name, row.kind.expected, _shown(value))


def check_tensor(
    model: str, kind: str, tensor: str, table: Table, parameters: Mapping[str, Parameter]
) -> None:
    """Raise an InvalidRequest for an invalid parameter of an input or output."""
    for name, value in parameters.items():
        row = table.get(name)
        if row is None:
            continue
        if not row.kind.fits(value):
            expected = f"parameter '{name}' to be {row.kind.expected}"
            raise InvalidTensor(model, kind, tensor, expected, _shown(value))


def _shown(value: Parameter) -> str:
    return repr(value)[:_SHOWN_CHARACTERS]


class NamedParameters:
    """Logs parameters without effect, each once per loaded version."""

    def __init__(self, obeyed: Table = MappingProxyType({}), info: ModelInfo | None = None) -> None:
        """`obeyed` has the rows of parameters that only this model obeys.

        Parameters that are passed to the model's own code do not count as ignored.
        """
        self._table = {**REQUEST, **obeyed}
        self._takes_those_of_requests = info is not None and info.takes_parameters
        self._takes_those_of_tensors = info is not None and info.takes_tensor_parameters
        self._named: set[str] = set()
        self._log = structlog.get_logger("parameters")

    def are_ordinary(self, parameters: Mapping[str, Parameter]) -> bool:
        """Tell whether all parameters of a request are valid and none needs to be logged."""
        for name, value in parameters.items():
            row = self._table.get(name)
            if row is None:
                if _describes(name, value):
                    continue
                if name.startswith(_RESERVED_PREFIX) or self._is_to_name(name):
                    return False
            elif not row.kind.fits(value) or (row.effect is Effect.NONE and self._is_to_name(name)):
                return False
        return True

    def check(self, request: InferRequest) -> None:
        """Raise an InvalidRequest for a parameter that is invalid for this model."""
        check_request(request.parameters, self._table)

    def note(self, request: InferRequest) -> None:
        """Log the parameters of a request that have no effect, each once."""
        new: dict[str, None] = {}
        for name in self._without_effect(request):
            if self._is_new(name):
                # Truncated: a client can send names as long as a message.
                self._named.add(name[:_SHOWN_CHARACTERS])
                new[name[:_SHOWN_CHARACTERS]] = None
        if new:
            self._log.warning(
                "request parameters without effect",
                model=request.model_name,
                parameters=list(new),
                more_will_be_logged=len(self._named) < MAX_NAMED,
            )

    def _without_effect(self, request: InferRequest) -> Iterator[str]:
        if not self._takes_those_of_requests:
            yield from _of(self._table, _asking(request.parameters))
        if self._takes_those_of_tensors:
            return
        for tensor in request.inputs:
            if tensor.parameters:
                yield from _of(INPUT, _asking(tensor.parameters))
        for output in request.outputs:
            if output.parameters:
                yield from _of(OUTPUT, output.parameters)

    def _is_to_name(self, name: str) -> bool:
        return not self._takes_those_of_requests and self._is_new(name)

    def _is_new(self, name: str) -> bool:
        return name[:_SHOWN_CHARACTERS] not in self._named and len(self._named) < MAX_NAMED


def of_tensors(request: InferRequest) -> TensorParameters:
    """Return the tensor parameters that are passed to the model's code."""
    if not (request.outputs or any(tensor.parameters for tensor in request.inputs)):
        return NO_TENSOR_PARAMETERS
    inputs = {tensor.name: _own(INPUT, tensor.parameters) for tensor in request.inputs}
    outputs = {output.name: _own(OUTPUT, output.parameters) for output in request.outputs}
    if not (any(inputs.values()) or any(outputs.values())):
        return NO_TENSOR_PARAMETERS
    return TensorParameters(
        {name: own for name, own in inputs.items() if own},
        {name: own for name, own in outputs.items() if own},
    )


def _own(table: Table, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    return {name: value for name, value in parameters.items() if name not in table}


def _describes(name: str, value: Parameter) -> bool:
    """Tell whether a parameter only describes the values sent, as xlaserve's client does."""
    return name == CONTENT_TYPE and (value in CONTENT_TYPES or value == DATA_FRAME)


def _asking(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    return {name: value for name, value in parameters.items() if not _describes(name, value)}


def _of(table: Table, parameters: Mapping[str, Parameter]) -> Iterator[str]:
    for name in parameters:
        row = table.get(name)
        if row is None or row.effect is Effect.NONE:
            yield name
