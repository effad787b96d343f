"""Result type of a decoding step; imports no JAX."""

from typing import NamedTuple

from xlaserve.tensors import Tensor


class Step(NamedTuple):
    """Results of one step on the host: one row per slot, or per row of a partial step."""

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor
