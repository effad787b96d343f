"""The classes that authors of Python models write against."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from xlaserve.runtime.calls import Arrays
from xlaserve.tensors import Parameter

Declared: TypeAlias = Mapping[str, tuple[str, Sequence[int]]]
"""Datatype and dims by tensor, as `{"x": ("FP32", [4])}`; without the batch, -1 for any size."""

Parameters: TypeAlias = Mapping[str, Mapping[str, Parameter]]
"""Parameters of tensors, by tensor."""

CODES = frozenset(
    (
        *("internal", "invalid_argument", "not_found", "already_exists"),
        *("unavailable", "unsupported", "cancelled", "unknown"),
    )
)
"""Kinds of errors that a model may raise."""


class InferenceError(Exception):
    """An error whose text is sent to the client unchanged; `code` decides the status."""

    def __init__(self, text: str, code: str = "invalid_argument") -> None:
        if code not in CODES:
            raise ValueError(f"code: expected one of {', '.join(sorted(CODES))}, got '{code}'")
        self.code = code
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class Request:
    """A request without its inputs, passed to an `infer` with two arguments."""

    id: str
    outputs: Sequence[str]
    """Names of the requested outputs; others may be omitted."""
    parameters: Mapping[str, Parameter]
    _of: Any = field(repr=False, compare=False)
    input_parameters: Parameters = field(default_factory=lambda: MappingProxyType({}))
    """Parameters by input, if any."""
    output_parameters: Parameters = field(default_factory=lambda: MappingProxyType({}))
    """Parameters of the outputs that the client asks for by name, by output."""

    @property
    def is_cancelled(self) -> bool:
        """Tell whether the request was abandoned."""
        return bool(self._of.is_cancelled)


@dataclass(frozen=True, slots=True)
class Answer:
    """Outputs with parameters of the response; `infer` may return or yield it.

    A parameter is a bool, a number or a string.
    """

    outputs: Any
    """The outputs by name, as `infer` returns them."""
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: MappingProxyType({}))
    """Parameters of the answer."""
    output_parameters: Parameters = field(default_factory=lambda: MappingProxyType({}))
    """Parameters of outputs, by output."""


class PythonModel:
    """A model in Python: subclass it once in model.py, and override `infer`.

    Each copy is an object with a thread of its own, in which all of its methods but `is_ready` are
    called.

    `infer` is a function, a generator that yields any number of answers (the model is decoupled
    then), or either of them `async`: then one copy works on many requests at a time.
    """

    inputs: ClassVar[Declared] = MappingProxyType({})
    """May be left out where the configuration has them; else both must agree."""
    outputs: ClassVar[Declared] = MappingProxyType({})
    max_batch_size: ClassVar[int] = 0
    """Most rows of a request; 0 where tensors have no batch dimension."""
    batched: ClassVar[bool] = False
    """Whether requests may share a call of `infer`."""
    decoded: ClassVar[bool] = False
    """Whether `infer` is given what inputs stand for by their content types, and its outputs are
    written by theirs (`xlaserve.tensors.content_types`)."""

    def load(self, context: Any) -> None:
        """Get ready; called once, before the first request, with the `Context` of the copy."""

    def infer(self, inputs: Arrays) -> Any:
        """Return the outputs by name; may take a `Request` as second argument."""
        raise NotImplementedError

    def is_ready(self) -> Any:
        """Tell whether the model would answer well, where a client asks; may be `async`.

        Called in a thread of its own, beside `infer`. No answer within five seconds is no.
        """
        return True

    def unload(self) -> None:
        """Clean up; called once, after the last request."""
