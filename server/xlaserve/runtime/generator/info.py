"""Facts about a loaded generator, for converting between text and tokens."""

from dataclasses import dataclass
from pathlib import Path

from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.language.text import LanguageText

TEXT, TOKENS = "text", "tokens"
"""Inputs: a prompt is one of them. `text` is an output too."""

WORD_BITS = 32
"""Tokens that a word of a mask speaks of, the first in its lowest bit."""


def mask_words(vocab: int) -> int:
    """Return the number of int32 words in a bit mask over all tokens."""
    return -(-vocab // WORD_BITS)


@dataclass(frozen=True, slots=True)
class GenerationInfo:
    """The facts of a loaded generator that stay as they are until it is unloaded."""

    vocab: int
    """Number of tokens; a token id is below it."""
    max_length: int
    """Context length: the most positions of one request, prompt and answer together."""
    stop_tokens: tuple[int, ...]
    """Token ids that end an answer."""
    directory: Path
    """The version directory, with the files of its tokenizer."""
    slots: int
    """Number of concurrent requests."""
    windows: tuple[int, ...]
    """Compiled attention windows in positions, ascending; the last is `max_length`."""
    chunk: int
    """Tokens per chunk of a prompt."""
    written_at: int = 0
    """Modification time of its description, in seconds since the epoch."""
    roots: Roots = ANYWHERE
    """Directories that may hold its files."""
    text: LanguageText | None = None
    """Its tokenizer and template; None if it takes token ids only."""
    no_text: str = ""
    """Why it has no text, unless it lacks a tokenizer."""
    is_text_offered: bool = False
    """Whether it has the input and output `text`."""
    tool_family: str = ""
    """Its format of tool calls, one of FAMILIES; empty for none."""
    has_grammars: bool = False
    """Whether requests may have a grammar."""
    keeps_prefixes: bool = False
    """Whether prompts reuse rows of the prefix cache."""
    step_sizes: tuple[int, ...] = ()
    """Step sizes below the number of slots, ascending."""

    def step_size(self, active: int) -> int:
        """Return the smallest step size for a number of requests."""
        return next((size for size in self.step_sizes if size >= active), self.slots)
