"""Accepts the outputs of Triton's Python models without checking them against the configuration."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import structlog

from xlaserve.errors.code import WrongOutput
from xlaserve.model_config.fields import STRICT_OUTPUTS
from xlaserve.tensors import BYTES, Tensor, TensorSpec, datatype_of, describe


class GivenOutputs:
    """Accepts outputs of any shape and datatype, as Triton does.

    The first mismatch between each output and the configuration is logged. The replicas of a model
    share one object, across threads.
    """

    def __init__(self, model: str, specs: Sequence[TensorSpec], *, batched: bool) -> None:
        self._model = model
        self._specs = {spec.name: spec for spec in specs}
        self._batched = batched
        self._noted: set[str] = set()
        self._log: Any = structlog.get_logger("python").bind(model=model)

    def checked(self, given: Mapping[str, Any], wanted: Sequence[str], rows: int) -> dict[str, Any]:
        """Return the requested outputs that the model gave, as arrays of a protocol datatype.

        Raises WrongOutput for an array whose dtype has no protocol datatype.
        """
        found = {}
        for name in wanted:
            spec = self._specs[name]
            if name not in given:
                self._note(spec, "none")
                continue
            array = given[name]
            if array.dtype != spec.datatype.dtype or spec.datatype is BYTES:
                array = self._readable(spec, array)
            found[name] = array
            shape = array.shape
            if array.dtype != spec.datatype.dtype or not self._fits(spec, shape, rows):
                self._note(spec, describe(_name(array), shape))
        return found

    def _fits(self, spec: TensorSpec, shape: tuple[int, ...], rows: int) -> bool:
        return spec.accepts(shape) and (not self._batched or shape[0] == rows)

    def _readable(self, spec: TensorSpec, array: Any) -> Tensor:
        """Convert an array to a dtype of the protocol, with strings as bytes."""
        if array.dtype == np.object_:
            texts = [_text(element) for element in array.ravel().tolist()]
            return np.fromiter(texts, np.object_, len(texts)).reshape(array.shape)
        if datatype_of(array.dtype) is None:
            array = array.astype(array.dtype.newbyteorder("="))
        if datatype_of(array.dtype) is None:
            got = describe(str(array.dtype), array.shape)
            raise WrongOutput(self._model, spec.name, str(spec), got)
        found: Tensor = array
        return found

    def _note(self, spec: TensorSpec, got: str) -> None:
        if spec.name not in self._noted:
            self._noted.add(spec.name)
            self._log.warning(
                "output mismatch with the configuration",
                output=spec.name,
                expected=str(spec),
                got=got,
                refused_by=f"parameter '{STRICT_OUTPUTS}' with 'true'",
            )


def _text(element: object) -> bytes:
    """Return an element as bytes; other objects are converted by `str`."""
    if isinstance(element, bytes):
        return element
    if isinstance(element, bytearray | memoryview):
        return bytes(element)
    return str(element).encode(errors="surrogatepass")


def _name(array: Tensor) -> str:
    datatype = datatype_of(array.dtype)
    return str(array.dtype) if datatype is None else datatype.name
