"""Conversion of the operator's settings to text limits."""

from dataclasses import replace

from xlaserve.language.text_limits import GRAMMAR, TEMPLATE, TOKENIZER, TextLimits
from xlaserve.settings import Settings


def text_limits(settings: Settings) -> TextLimits:
    """Return the text limits for every model.

    The output limit and the wall-clock limit are fixed: grammar results are short, rendered
    templates are limited by the tokenizer's own limit, and the wall-clock limit only detects lost
    processes.
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
