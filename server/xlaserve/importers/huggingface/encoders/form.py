"""The form of an encoder: the sizes and switches that its arithmetic needs."""

from collections.abc import Mapping
from dataclasses import dataclass

from xlaserve.importers.huggingface.form import Stored

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Ways to make one vector of those of all tokens, in the order in which several are joined."""


@dataclass(frozen=True, slots=True)
class EncoderForm:
    """The computation of `forward.embed`, without its numbers."""

    vocab: int
    hidden: int
    heads: int
    intermediate: int
    layers: int
    positions: int
    """Rows of the table of learned positions."""
    first_position: int
    """Row of the first token: RoBERTa's start after that of padding."""
    types: int
    """Rows of the table of types, of which the first is taken; 0 for no table."""
    relative: int
    """Buckets of the distances that attention is biased by; 0 for none."""
    norm_epsilon: float
    activation: str
    poolings: tuple[str, ...]
    """Some of POOLINGS, in their order."""
    is_normalised: bool
    """Whether an embedding has the length 1."""
    max_tokens: int
    pad: int
    prompt: str
    """The beginning of every text."""
    ends: tuple[Stored, ...]
    layer: tuple[Stored, ...]
    layer_name: str
    """The name of a layer, before its number."""

    @property
    def head_dim(self) -> int:
        """Return the elements of one head of attention."""
        return self.hidden // self.heads

    @property
    def size(self) -> int:
        """Return the elements of one embedding."""
        return self.hidden * len(self.poolings)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the sizes that shapes of tensors name."""
        return {
            "vocab": self.vocab,
            "positions": self.positions,
            "types": self.types,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "buckets": self.relative,
            "heads": self.heads,
        }
