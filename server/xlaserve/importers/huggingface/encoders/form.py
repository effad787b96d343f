"""The form of an encoder: its sizes and switches."""

from collections.abc import Mapping
from dataclasses import dataclass

from xlaserve.importers.huggingface.form import Stored

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Supported pooling modes. If a model has several, their results are concatenated in this order."""


@dataclass(frozen=True, slots=True)
class EncoderForm:
    """The sizes and switches that `forward.embed` needs besides the parameters."""

    vocab: int
    hidden: int
    heads: int
    intermediate: int
    layers: int
    positions: int
    """Rows of the position embedding table."""
    first_position: int
    """Row of the first token's position; RoBERTa's positions start after the padding position."""
    types: int
    """Rows of the token type table, of which only the first is used; 0 if there is no table."""
    relative: int
    """Number of relative position buckets for the attention bias; 0 if there is no bias."""
    norm_epsilon: float
    activation: str
    poolings: tuple[str, ...]
    """Pooling modes, in the order of POOLINGS."""
    is_normalised: bool
    """Whether embeddings are normalised to length 1."""
    max_tokens: int
    pad: int
    prompt: str
    """Text to prepend to every input."""
    ends: tuple[Stored, ...]
    layer: tuple[Stored, ...]
    layer_name: str
    """Prefix of a layer's tensor names, before the layer number."""

    @property
    def head_dim(self) -> int:
        """Return the dimension of one attention head."""
        return self.hidden // self.heads

    @property
    def size(self) -> int:
        """Return the dimension of an embedding."""
        return self.hidden * len(self.poolings)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the sizes that `Stored.shape` refers to, by name."""
        return {
            "vocab": self.vocab,
            "positions": self.positions,
            "types": self.types,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "buckets": self.relative,
            "heads": self.heads,
        }
