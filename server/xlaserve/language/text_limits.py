"""The most that texts of clients may take, by what computes them."""

from dataclasses import dataclass, replace

from xlaserve.language.limited import Limits
from xlaserve.settings import Settings

TEMPLATE = Limits(cpu_seconds=2.0)
TOKENIZER = Limits(cpu_seconds=1.0)
"""Tokens of a megabyte take half of it."""
GRAMMAR = Limits(cpu_seconds=0.05, output_bytes=1 << 16, seconds=10.0)
"""One of 64 KiB with 6,000 values takes 0.01 s, as a `multipleOf` of 10,000 does, each of whose
remainders is a state."""


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Those of each model."""

    template: Limits = TEMPLATE
    tokenizer: Limits = TOKENIZER
    grammar: Limits = GRAMMAR
    waiting: int = 256
    """Texts of one caller that wait for a thread: more are refused, and those of others are not."""

    @classmethod
    def of(cls, settings: Settings) -> "TextLimits":
        """Return those that an operator has set."""
        given = {
            "template": (TEMPLATE, settings.template_seconds),
            "tokenizer": (TOKENIZER, settings.tokenizer_seconds),
            "grammar": (GRAMMAR, settings.grammar_seconds),
        }
        size = settings.text_process_bytes
        limits = {
            # What it may write and its time on the clock stay: no operator would change them. A
            # verdict is a line, a text of a template is bound by what becomes tokens at once, and
            # the clock only tells that a process is lost.
            name: replace(limits, cpu_seconds=seconds, memory_bytes=size)
            for name, (limits, seconds) in given.items()
        }
        return cls(**limits, waiting=settings.max_waiting_texts)


DEFAULT_TEXT_LIMITS = TextLimits()
