"""Default resource limits for processing client text."""

from dataclasses import dataclass

from xlaserve.language.limited import Limits

TEMPLATE = Limits(cpu_seconds=2.0)
TOKENIZER = Limits(cpu_seconds=1.0)
"""Tokenizing a megabyte takes about half of this."""
GRAMMAR = Limits(cpu_seconds=0.05, output_bytes=1 << 16, seconds=10.0)
"""Measured: a schema of 64 KiB with 6,000 values takes 0.01 s, as does a `multipleOf` of 10,000,
which has one state per remainder."""

ENCODED_TIMES = 160
"""Memory for tokenizing, per byte of text, in both processes, if every byte is a token."""


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Limits that apply to each model."""

    template: Limits = TEMPLATE
    tokenizer: Limits = TOKENIZER
    grammar: Limits = GRAMMAR
    waiting: int = 256
    """Maximum number of texts queued per caller; only further texts of that caller are refused."""


DEFAULT_TEXT_LIMITS = TextLimits()
