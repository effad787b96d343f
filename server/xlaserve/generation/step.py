"""The result of one step of a generator. Needs no JAX."""

from typing import NamedTuple

from xlaserve.tensors import Tensor


class Step(NamedTuple):
    """The tokens that one step gave, on the host: a row for each slot, or for each it was of."""

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor
