"""Builds typed contents for the responses to requests with typed contents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from xlaserve.errors import TooLarge
from xlaserve.serving.inference import InferOutput, PlacedOutput
from xlaserve.settings.choices import TypedAnswerForm
from xlaserve.tensors import BYTES, encoded_elements
from xlaserve_proto import inference as pb

_FEW = 32
"""Up to this many elements, encoding a list is faster than encoding an array."""
_BYTES_OF_AN_ELEMENT: Mapping[str | None, int] = MappingProxyType(
    {
        "bool_contents": 1,
        "int_contents": 10,  # negative values are sign-extended to 64 bits: ten bytes
        "int64_contents": 10,
        "uint_contents": 5,
        "uint64_contents": 10,
        "fp32_contents": 4,
        "fp64_contents": 8,
        # In addition to the element's bytes: more than the overhead, since each element takes extra
        # time.
        "bytes_contents": 64,
        None: 0,
    }
)
"""Field of InferTensorContents -> maximum bytes per element of a response."""


class Form(NamedTuple):
    """How the outputs of a response are encoded: typed contents, raw contents, or both."""

    contents: list[pb.InferTensorContents | None]
    """The typed contents of each output; None for an output that has none."""
    raw: bool
    """Whether the response has raw contents, which it then has for all outputs."""


@dataclass(frozen=True, slots=True)
class TypedAnswers:
    """Chooses how to encode the responses to requests with typed contents, from the settings."""

    form: TypedAnswerForm = TypedAnswerForm.BOTH
    max_bytes: int = 2 << 20

    def write(self, outputs: Sequence[InferOutput]) -> Form:
        """Return the form for outputs.

        If an output's datatype has no typed field, all outputs get raw contents as well. If typed
        contents would add more than `max_bytes`, the response has raw contents only, or TooLarge is
        raised if the setting requires typed contents.
        """
        if self.form is TypedAnswerForm.RAW:
            return Form([None] * len(outputs), raw=True)
        if (
            sum(_added_bytes(o) for o in outputs if not isinstance(o, PlacedOutput))
            > self.max_bytes
        ):
            if self.form is TypedAnswerForm.TYPED:
                what = "the typed contents of the answer (send raw_input_contents for a raw answer)"
                raise TooLarge(what, self.max_bytes, "max_typed_answer_bytes")
            return Form([None] * len(outputs), raw=True)
        contents = [None if isinstance(o, PlacedOutput) else _contents(o) for o in outputs]
        has_raw = any(
            written is None and not isinstance(output, PlacedOutput)
            for output, written in zip(outputs, contents, strict=True)
        )
        return Form(contents, raw=self.form is TypedAnswerForm.BOTH or has_raw)


def _added_bytes(output: InferOutput) -> int:
    data = output.data
    size = data.size * _BYTES_OF_AN_ELEMENT[output.datatype.contents]
    if output.datatype is BYTES:
        size += sum(map(len, encoded_elements(data)))
    return size


def _contents(output: InferOutput) -> pb.InferTensorContents | None:
    field, data = output.datatype.contents, output.data
    if field is None:
        return None
    elements: Any
    if output.datatype is BYTES:
        elements = encoded_elements(data)
    else:
        elements = data.ravel().tolist() if data.size <= _FEW else data.ravel()
    return pb.InferTensorContents(**{field: elements})
