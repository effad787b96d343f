"""Facts about a loaded embedding model, for tokenizing its input."""

from bisect import bisect_left
from dataclasses import dataclass

from xlaserve.language.tokenizing import Tokens
from xlaserve.runtime.embedding.text_files import TextFiles
from xlaserve.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class EmbeddingInfo:
    """The facts of a model of embeddings that stay as they are until it is unloaded."""

    tokens: TensorSpec
    """The input of token ids, [batch, tokens]."""
    mask: TensorSpec | None
    """The attention mask's input, 1 for each real token and 0 for padding; None without padding."""
    types: TensorSpec | None
    """An input of zeros, the token types of BERT; None for none."""
    output: TensorSpec
    """The output, FP32 [batch, size]."""
    lengths: tuple[int, ...]
    """Numbers of tokens that the load compiles, ascending; longer inputs are compiled on demand."""
    max_tokens: int
    """The most tokens of one input."""
    vocab: int | None = None
    """Vocabulary size, above every token id; None if unknown."""
    pad: int = 0
    """The token id of padding, hidden by the mask."""
    cuts: tuple[int, ...] | None = None
    """Sizes to which an embedding may be cut, ascending (Matryoshka); None for any, () for none."""
    prompt: str = ""
    """Prefix of every text."""
    text: Tokens | None = None
    """Its tokenizer; None if it takes token ids only."""
    no_text: str = ""
    """Why it has no text, following the model's name; empty without a tokenizer file."""
    written_at: int = 0
    """Modification time of its version directory, in seconds since the epoch."""
    files: TextFiles | None = None
    """Files of `text`; None without it."""

    @property
    def size(self) -> int:
        """Return the elements of one embedding."""
        return self.output.shape[-1]

    def length_for(self, count: int) -> int:
        """Return the padded number of tokens of an input."""
        if self.mask is None:
            return count
        at = bisect_left(self.lengths, count)
        return self.lengths[at] if at < len(self.lengths) else min(_power(count), self.max_tokens)

    def may_cut_to(self, size: int) -> bool:
        """Tell whether an embedding may be cut to a size, or has it."""
        if size == self.size:
            return True
        return 0 < size < self.size and (self.cuts is None or size in self.cuts)


def _power(count: int) -> int:
    """Return the next power of two."""
    return 1 << max(0, count - 1).bit_length()
