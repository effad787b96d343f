"""Tensors and sequence parameters passed between the steps of an ensemble."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import structlog

from xlaserve.model_config.config import EnsembleStep
from xlaserve.runtime.handling import AnswerParameters, Parameters
from xlaserve.runtime.loaded import Value
from xlaserve.serving.inference import DetailedResponse, InferResponse
from xlaserve.serving.parameters import SEQUENCE, check_request

Sequences: TypeAlias = Mapping[str, Parameters]
"""Sequence parameters by tensor, for tensors whose step named a sequence."""

_NONE: Sequences = MappingProxyType({})


class Flow(NamedTuple):
    """The tensors available to the next steps, and the sequences named by answers (as in Triton).

    If a step's answer has sequence parameters, later steps use that sequence instead of the
    request's, unless one of them names another.
    """

    tensors: Mapping[str, Value]
    sequences: Sequences = _NONE

    def with_answer(self, step: EnsembleStep, response: InferResponse, own: Parameters) -> "Flow":
        """Return a flow with the outputs of a step; `own` are the step's request parameters.

        Raises InvalidParameter if the answer's sequence parameters are invalid.
        """
        outputs = {output.name: output.data for output in response.outputs}
        output_map = step.output_map
        made = {tensor: outputs[name] for name, tensor in output_map.items() if name in outputs}
        named = _sequence_of(response, own)
        sequences = self.sequences
        if named is None and sequences:
            named = next(iter(self._named(step.input_map.values())), None)
        if named is not None:
            sequences = {**sequences, **dict.fromkeys(output_map.values(), named)}
        return Flow({**self.tensors, **made}, sequences)

    def parameters(self, model: str, taken: Iterable[str], given: Parameters) -> Parameters:
        """Return the parameters of a step with the inputs `taken`, given the request's."""
        if not self.sequences:
            return given
        named = self._named(taken)
        if not named:
            return given
        if any(other != named[0] for other in named[1:]):
            log = structlog.get_logger("ensemble")
            log.warning(
                "step inputs from different sequences", model=model, used_sequence=dict(named[0])
            )
        others = {name: value for name, value in given.items() if name not in SEQUENCE}
        return {**others, **named[0]}

    def _named(self, taken: Iterable[str]) -> Sequence[Parameters]:
        return [self.sequences[tensor] for tensor in taken if tensor in self.sequences]

    def answer_parameters(self, outputs: Iterable[str]) -> AnswerParameters | None:
        """Return the sequence parameters of the first of these outputs that has any, or None."""
        for output in outputs:
            if output in self.sequences:
                return AnswerParameters(self.sequences[output])
        return None


def _sequence_of(response: InferResponse, own: Parameters) -> Parameters | None:
    if not isinstance(response, DetailedResponse):
        return None
    named = {name: response.parameters[name] for name in SEQUENCE if name in response.parameters}
    if not named:
        return None
    check_request(named)
    first, start, end = SEQUENCE
    sequence = {start: named.get(start, False), end: named.get(end, False)}
    identifier = named.get(first, own.get(first))
    return sequence if identifier is None else {first: identifier, **sequence}
