"""The outputs of Python code, checked against what the model promises."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from xlaserve.code_errors import (
    MissingOutputs,
    WrongOutput,
)
from xlaserve.tensors import (
    BYTES,
    Datatype,
    Tensor,
    TensorDataError,
    TensorSpec,
    datatype_of,
    describe,
    encoded_elements,
)


class OutputCheck:
    """Checks the answers of one model."""

    def __init__(
        self,
        model: str,
        specs: Sequence[TensorSpec],
        *,
        batched: bool,
        converts: bool = False,
    ) -> None:
        """With `converts` numbers may come in another width, where none of them changes."""
        self._model = model
        self._converts = converts
        self._specs = {spec.name: spec for spec in specs}
        self._batched = batched

    def checked(self, given: object, wanted: Sequence[str], rows: int) -> dict[str, Tensor]:
        """Return the outputs that are wanted, as arrays.

        Raises MissingOutputs or WrongOutput, which name the model and the tensor.
        """
        if not isinstance(given, Mapping):
            got = type(given).__name__
            raise WrongOutput(self._model, "", "a mapping of arrays by output", got)
        missing = [name for name in wanted if name not in given]
        if missing:
            raise MissingOutputs(self._model, missing, map(str, given))
        return {name: self.array(name, given[name], rows) for name in wanted}

    def array(self, name: str, value: object, rows: int | None) -> Tensor:
        """Return one output as an array of its datatype; raises WrongOutput.

        `rows` are those of its request; None leaves the first dimension open.
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
        # Arrays of JAX, and lists. What it takes to copy them is the author's to know.
        try:
            if spec.datatype is BYTES and isinstance(value, list | tuple):
                return np.array(value, np.object_)
            return np.asarray(value)
        except Exception as error:
            got = f"{type(value).__name__} ({error})"
            raise WrongOutput(self._model, spec.name, str(spec), got) from error

    def _texts(self, spec: TensorSpec, array: Any) -> Any:
        """Return an array of `bytes`, of one that may hold texts as well."""
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
            if np.array_equal(found, array, equal_nan=wanted.dtype.kind == "f"):
                return found
        raise WrongOutput(self._model, spec.name, str(spec), describe(_name(array), array.shape))


def _name(array: Any) -> str:
    found: Datatype | None = datatype_of(array.dtype)
    return found.name if found else str(array.dtype)
