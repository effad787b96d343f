"""The limits of texts that an operator has set."""

from dataclasses import replace

from xlaserve.language.text_limits import GRAMMAR, TEMPLATE, TOKENIZER, TextLimits
from xlaserve.settings import Settings


def text_limits(settings: Settings) -> TextLimits:
    """Return the limits of every model's texts.

    What a process may write and its time on the clock stay: no operator would change them. A
    verdict is a line, a text of a template is bound by what becomes tokens at once, and the clock
    only tells that a process is lost.
    """
    given = {
        "template": (TEMPLATE, settings.template_seconds),
        "tokenizer": (TOKENIZER, settings.tokenizer_seconds),
        "grammar": (GRAMMAR, settings.grammar_seconds),
    }
    size = settings.text_process_bytes
    limits = {
        name: replace(limits, cpu_seconds=seconds, memory_bytes=size)
        for name, (limits, seconds) in given.items()
    }
    return TextLimits(**limits, waiting=settings.max_waiting_texts)
