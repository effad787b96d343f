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
    """Return how many int32 have a bit for each token."""
    return -(-vocab // WORD_BITS)


@dataclass(frozen=True, slots=True)
class GenerationInfo:
    """The facts of a loaded generator that stay as they are until it is unloaded."""

    vocab: int
    """Number of tokens; a token id is below it."""
    max_length: int
    """The most positions of one request, prompt and answer together, as the server has them."""
    stop_tokens: tuple[int, ...]
    """Token ids that end an answer."""
    directory: Path
    """The version directory, with the files of its tokenizer."""
    slots: int
    """Requests that are generated side by side."""
    windows: tuple[int, ...]
    """Attention windows that are compiled, in positions, ascending; the last is `max_length`."""
    chunk: int
    """Tokens of a prompt that are computed at a time."""
    written_at: int = 0
    """Modification time of its description, in seconds since the epoch."""
    roots: Roots = ANYWHERE
    """Directories that may hold its files."""
    text: LanguageText | None = None
    """Its tokenizer and template; None where it takes token ids only."""
    no_text: str = ""
    """Why it has no text, unless it lacks a tokenizer."""
    is_text_offered: bool = False
    """Whether `text` is one of its inputs and outputs."""
    tool_family: str = ""
    """The way in which it writes calls of tools, one of FAMILIES; empty for none."""
    has_grammars: bool = False
    """Whether answers may be asked to follow a grammar."""
    keeps_prefixes: bool = False
    """Whether prompts reuse rows of the prefix cache."""
    step_sizes: tuple[int, ...] = ()
    """Rows that a step may compute, ascending, besides all slots: those of fewer."""

    def step_size(self, active: int) -> int:
        """Return the rows of the smallest step that holds so many requests."""
        return next((size for size in self.step_sizes if size >= active), self.slots)
