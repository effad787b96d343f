"""Typed contents in answers to requests with typed contents."""

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
"""Size up to which a list is written faster than an array."""
_BYTES_OF_AN_ELEMENT: Mapping[str | None, int] = MappingProxyType(
    {
        "bool_contents": 1,
        "int_contents": 10,  # a negative one has ten bytes, as in 64 bits
        "int64_contents": 10,
        "uint_contents": 5,
        "uint64_contents": 10,
        "fp32_contents": 4,
        "fp64_contents": 8,
        # And what it holds. It has fewer bytes around that, but is written by itself.
        "bytes_contents": 64,
        None: 0,
    }
)
"""Field of InferTensorContents -> maximum bytes per element of an answer."""


class Form(NamedTuple):
    """The form of an answer."""

    contents: list[pb.InferTensorContents | None]
    """The typed contents of each output; None for one without."""
    raw: bool
    """Whether all outputs have raw contents, which pair with outputs by order."""


@dataclass(frozen=True, slots=True)
class TypedAnswers:
    """Writes answers to typed requests as a setting says, within a limit."""

    form: TypedAnswerForm = TypedAnswerForm.BOTH
    max_bytes: int = 2 << 20

    def write(self, outputs: Sequence[InferOutput]) -> Form:
        """Return how to write outputs.

        An output of a datatype without a typed field is raw, and then all of them are raw too.
        Those that typed contents would make longer by more than the limit are raw alone; where
        there may be no raw contents, this raises TooLarge.
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
