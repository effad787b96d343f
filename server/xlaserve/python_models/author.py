"""The base class, and the request and answer types, that a model.py uses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from xlaserve.runtime.calls import Arrays
from xlaserve.tensors import Parameter

Declared: TypeAlias = Mapping[str, tuple[str, Sequence[int]]]
"""Datatype and dims by tensor name, for instance `{"x": ("FP32", [4])}`. The dims leave out the
batch dimension; -1 means any size."""

Parameters: TypeAlias = Mapping[str, Mapping[str, Parameter]]
"""Tensor parameters by tensor name."""

CODES = frozenset(
    (
        *("internal", "invalid_argument", "not_found", "already_exists"),
        *("unavailable", "unsupported", "cancelled", "unknown"),
    )
)
"""Error codes that a model may raise."""


class InferenceError(Exception):
    """An error whose text is sent to the client unchanged; `code` selects the status."""

    def __init__(self, text: str, code: str = "invalid_argument") -> None:
        if code not in CODES:
            raise ValueError(f"code: expected one of {', '.join(sorted(CODES))}, got '{code}'")
        self.code = code
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class Request:
    """The metadata of a request, passed to `infer` if it takes a second argument."""

    id: str
    outputs: Sequence[str]
    """Names of the requested outputs; `infer` may omit all others."""
    parameters: Mapping[str, Parameter]
    _of: Any = field(repr=False, compare=False)
    input_parameters: Parameters = field(default_factory=lambda: MappingProxyType({}))
    """Parameters of the inputs, by input name."""
    output_parameters: Parameters = field(default_factory=lambda: MappingProxyType({}))
    """Parameters of the requested outputs, by output name."""

    @property
    def is_cancelled(self) -> bool:
        """Tell whether the client has cancelled or abandoned the request."""
        return bool(self._of.is_cancelled)


@dataclass(frozen=True, slots=True)
class Answer:
    """Outputs and response parameters; `infer` may return or yield it.

    Each parameter is a bool, a number or a string.
    """

    outputs: Any
    """Arrays by output name, as `infer` would return them without parameters."""
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: MappingProxyType({}))
    """Parameters of the response."""
    output_parameters: Parameters = field(default_factory=lambda: MappingProxyType({}))
    """Parameters of the outputs, by output name."""


class PythonModel:
    """Base class of a model in Python: model.py defines one subclass, which overrides `infer`.

    Each replica is an instance with its own thread, which calls every method except `is_ready`.

    `infer` is a function, or a generator that yields any number of answers (a decoupled model).
    Either may be `async`: one replica then works on many requests concurrently.
    """

    inputs: ClassVar[Declared] = MappingProxyType({})
    """Input tensors. May be omitted if the configuration lists them; otherwise both must agree."""
    outputs: ClassVar[Declared] = MappingProxyType({})
    max_batch_size: ClassVar[int] = 0
    """Maximum number of rows per request; 0 if the tensors have no batch dimension."""
    batched: ClassVar[bool] = False
    """Whether one call of `infer` may execute several requests as a batch."""
    decoded: ClassVar[bool] = False
    """Whether `infer` takes and returns values decoded by content type
    (`xlaserve.tensors.content_types`) instead of arrays."""

    def load(self, context: Any) -> None:
        """Prepare the model; called once, before the first request, with its `Context`."""

    def infer(self, inputs: Arrays) -> Any:
        """Return the outputs by name; may take a `Request` as second argument."""
        raise NotImplementedError

    def is_ready(self) -> Any:
        """Tell whether the model can answer requests; called by readiness probes, may be `async`.

        Called in a separate thread, concurrently with `infer`. A call that takes more than five
        seconds counts as False.
        """
        return True

    def unload(self) -> None:
        """Clean up; called once, after the last request."""
