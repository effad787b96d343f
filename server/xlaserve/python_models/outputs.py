"""Validates the outputs of Python code against the model's signature."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from xlaserve.errors.code import MissingOutputs, WrongOutput
from xlaserve.python_models.author import Parameters
from xlaserve.runtime.handling import AnswerParameters
from xlaserve.tensors import (
    BYTES,
    Datatype,
    Kind,
    Parameter,
    Tensor,
    TensorDataError,
    TensorSpec,
    datatype_of,
    describe,
    encoded_elements,
)

_RESERVED = frozenset(("triton_final_response", "binary_data_size"))
"""Names that the protocol itself uses in response and output parameters."""

_SHOWN_CHARACTERS = 80


class OutputCheck:
    """Validates the answers of one model."""

    def __init__(
        self,
        model: str,
        specs: Sequence[TensorSpec],
        *,
        batched: bool,
        converts: bool = False,
    ) -> None:
        """With `converts`, numbers of another width are accepted if the conversion is exact."""
        self._model = model
        self._converts = converts
        self._specs = {spec.name: spec for spec in specs}
        self._batched = batched

    def checked(self, given: object, wanted: Sequence[str], rows: int) -> dict[str, Tensor]:
        """Return the requested outputs as arrays.

        Raises MissingOutputs or WrongOutput, which name the model and the tensor.
        """
        if not isinstance(given, Mapping):
            got = type(given).__name__
            raise WrongOutput(self._model, "", "a mapping of arrays by output", got)
        missing = [name for name in wanted if name not in given]
        if missing:
            raise MissingOutputs(self._model, missing, map(str, given))
        return {name: self.array(name, given[name], rows) for name in wanted}

    def parameters(
        self, given: Mapping[str, Parameter], of_outputs: Parameters
    ) -> AnswerParameters | None:
        """Return the parameters of an answer and its outputs, or None if there are none.

        Raises WrongOutput for a parameter that the protocol cannot represent.
        """
        if not (given or of_outputs):
            return None
        unknown = [name for name in of_outputs if name not in self._specs]
        if unknown:
            known = ", ".join(self._specs)
            expected = f"parameters of its outputs ({known})"
            raise WrongOutput(self._model, "", expected, f"those of {unknown[0]!r}")
        return AnswerParameters(
            self._checked("", given),
            {name: self._checked(name, parameters) for name, parameters in of_outputs.items()},
        )

    def _checked(self, output: str, given: Mapping[str, Parameter]) -> dict[str, Parameter]:
        return {str(name): self._value(output, name, value) for name, value in given.items()}

    def _value(self, output: str, name: object, value: object) -> Parameter:
        plain = value.item() if isinstance(value, np.generic) else value
        if not isinstance(name, str) or not _is_text(name) or name in _RESERVED:
            expected = f"parameter names to be strings other than {', '.join(sorted(_RESERVED))}"
            raise WrongOutput(self._model, output, expected, repr(name))
        if not _is_sendable(plain):
            raise WrongOutput(
                self._model,
                output,
                f"parameter '{name}' to be a boolean, a 64-bit integer, a finite number or a"
                " string",
                repr(value)[:_SHOWN_CHARACTERS],
            )
        return cast(Parameter, plain)

    def array(self, name: str, value: object, rows: int | None) -> Tensor:
        """Return one output as an array of its datatype; raises WrongOutput.

        `rows` is the number of rows of the request; None accepts any first dimension.
        """
        spec = self._specs[name]
        array = cast(Any, value) if isinstance(value, np.ndarray) else self._converted(spec, value)
        if array.dtype != spec.datatype.dtype:
            array = self._as_datatype(spec, array)
        if spec.datatype is BYTES:
            array = self._texts(spec, array)
        shape = array.shape
        if shape != spec.shape or -1 in spec.shape:
            right_rows = not (self._batched and rows is not None) or shape[:1] == (rows,)
            if not spec.accepts(shape) or not right_rows:
                expected = describe(spec.datatype, self._expected(spec, rows))
                raise WrongOutput(self._model, name, expected, describe(spec.datatype, shape))
        return cast(Tensor, array)

    def _expected(self, spec: TensorSpec, rows: int | None) -> tuple[int, ...]:
        return (rows, *spec.shape[1:]) if self._batched and rows is not None else spec.shape

    def _converted(self, spec: TensorSpec, value: object) -> Any:
        # JAX arrays and lists may be copied here, unlike numpy arrays.
        try:
            if spec.datatype is BYTES and isinstance(value, list | tuple):
                return np.array(value, np.object_)
            return np.asarray(value)
        except Exception as error:
            got = f"{type(value).__name__} ({error})"
            raise WrongOutput(self._model, spec.name, str(spec), got) from error

    def _texts(self, spec: TensorSpec, array: Any) -> Any:
        """Return an array of `bytes` from one that may contain strings."""
        try:
            elements = encoded_elements(array)
        except TensorDataError as error:
            raise WrongOutput(self._model, spec.name, error.expected, error.got) from None
        return np.fromiter(elements, np.object_, len(elements)).reshape(array.shape)

    def _as_datatype(self, spec: TensorSpec, array: Any) -> Any:
        wanted = spec.datatype
        if wanted is BYTES and array.dtype.kind in "SU":
            return array.astype(np.object_)
        if self._converts and array.dtype.kind == wanted.dtype.kind:
            found = array.astype(wanted.dtype)
            if np.array_equal(found, array, equal_nan=wanted.kind is Kind.FLOAT):
                return found
        raise WrongOutput(self._model, spec.name, str(spec), describe(_name(array), array.shape))


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_sendable(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return _is_text(value)
    return isinstance(value, bool) or (isinstance(value, int) and -(2**63) <= value < 2**64)


def _name(array: Any) -> str:
    found: Datatype | None = datatype_of(array.dtype)
    return found.name if found else str(array.dtype)
