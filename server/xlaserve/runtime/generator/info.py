"""Facts about a loaded generator that request handling needs."""

from dataclasses import dataclass
from pathlib import Path

from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.language.text import LanguageText

TEXT, TOKENS = "text", "tokens"
"""Input names: a request has one of these as its prompt. `text` is also an output."""

WORD_BITS = 32
"""Tokens per word of a token mask; the lowest bit is the first token."""


def mask_words(vocab: int) -> int:
    """Return the number of int32 words in a bit mask over all tokens."""
    return -(-vocab // WORD_BITS)


@dataclass(frozen=True, slots=True)
class GenerationInfo:
    """Facts about a generator, constant while it is loaded."""

    vocab: int
    """Vocabulary size: token ids are below it."""
    max_length: int
    """Context length: maximum number of positions per request, prompt and answer together."""
    stop_tokens: tuple[int, ...]
    """Token ids that end an answer."""
    directory: Path
    """The version directory, which contains the tokenizer files."""
    slots: int
    """Number of concurrent requests."""
    windows: tuple[int, ...]
    """Compiled attention windows in positions, ascending; the last is `max_length`."""
    chunk: int
    """Tokens per chunk of a prompt."""
    written_at: int = 0
    """Modification time of the generator's description, in seconds since the epoch."""
    roots: Roots = ANYWHERE
    """Directories that may contain the model's files."""
    text: LanguageText | None = None
    """The tokenizer and chat template; None if the model only accepts token ids."""
    no_text: str = ""
    """Why the model does not accept text; empty if it has text or has no tokenizer."""
    is_text_offered: bool = False
    """Whether the model has the input and output `text`."""
    tool_family: str = ""
    """Format of tool calls, one of FAMILIES; empty if the model supports none."""
    has_grammars: bool = False
    """Whether requests may have a grammar."""
    keeps_prefixes: bool = False
    """Whether prompts reuse rows of the prefix cache."""
    step_sizes: tuple[int, ...] = ()
    """Step sizes below the number of slots, ascending."""

    def step_size(self, active: int) -> int:
        """Return the smallest step size that fits this number of requests."""
        return next((size for size in self.step_sizes if size >= active), self.slots)
