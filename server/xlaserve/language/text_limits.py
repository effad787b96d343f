"""The most that texts of clients may take, by what computes them."""

from dataclasses import dataclass

from xlaserve.language.limited import Limits

TEMPLATE = Limits(cpu_seconds=2.0)
TOKENIZER = Limits(cpu_seconds=1.0)
"""Tokens of a megabyte take half of it."""
GRAMMAR = Limits(cpu_seconds=0.05, output_bytes=1 << 16, seconds=10.0)
"""One of 64 KiB with 6,000 values takes 0.01 s, as a `multipleOf` of 10,000 does, each of whose
remainders is a state."""

ENCODED_TIMES = 160
"""Memory of making tokens per octet of text, here and in its process, if each is a token."""


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Those of each model."""

    template: Limits = TEMPLATE
    tokenizer: Limits = TOKENIZER
    grammar: Limits = GRAMMAR
    waiting: int = 256
    """Texts of one caller that wait for a thread: more are refused, and those of others are not."""


DEFAULT_TEXT_LIMITS = TextLimits()
