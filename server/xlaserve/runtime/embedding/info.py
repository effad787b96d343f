"""Facts about a loaded embedding model that request handling needs."""

from bisect import bisect_left
from dataclasses import dataclass

from xlaserve.language.tokenizing import Tokens
from xlaserve.runtime.embedding.text_files import TextFiles
from xlaserve.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class EmbeddingInfo:
    """Facts about an embedding model, constant while it is loaded."""

    tokens: TensorSpec
    """The input of token ids, [batch, tokens]."""
    mask: TensorSpec | None
    """The attention mask's input, 1 for real tokens and 0 for padding; None if inputs cannot be
    padded.
    """
    types: TensorSpec | None
    """The input of token types (BERT), always zeros; None if the model has none."""
    output: TensorSpec
    """The output, FP32 [batch, size]."""
    lengths: tuple[int, ...]
    """Token counts compiled at load, ascending. Longer inputs are compiled on demand."""
    max_tokens: int
    """Maximum number of tokens per input."""
    vocab: int | None = None
    """Vocabulary size: token ids are below it. None if unknown."""
    pad: int = 0
    """Token id used as padding; the mask hides it."""
    cuts: tuple[int, ...] | None = None
    """Sizes to which an embedding may be truncated, ascending (Matryoshka); None for any size, and
    empty for none.
    """
    prompt: str = ""
    """Prefix that is added to every text."""
    text: Tokens | None = None
    """The tokenizer; None if the model only accepts token ids."""
    no_text: str = ""
    """Why the model does not accept text, as the end of a sentence that starts with its name; empty
    if it has no tokenizer file.
    """
    written_at: int = 0
    """Modification time of the version directory, in seconds since the epoch."""
    files: TextFiles | None = None
    """The files that `text` was read from, or None without a tokenizer."""

    @property
    def size(self) -> int:
        """Return the number of elements of an embedding."""
        return self.output.shape[-1]

    def length_for(self, count: int) -> int:
        """Return the padded length of an input of `count` tokens."""
        if self.mask is None:
            return count
        at = bisect_left(self.lengths, count)
        return self.lengths[at] if at < len(self.lengths) else min(_power(count), self.max_tokens)

    def may_cut_to(self, size: int) -> bool:
        """Tell whether embeddings may be truncated to this size, or have it already."""
        if size == self.size:
            return True
        return 0 < size < self.size and (self.cuts is None or size in self.cuts)


def _power(count: int) -> int:
    """Round up to a power of two."""
    return 1 << max(0, count - 1).bit_length()
