"""The unsupported operation of a compilation, and the author's line."""

import re

from xlaserve.offline.targets.jobs import Problem

_MAX_CHARACTERS = 300

_OPERATIONS = tuple(
    re.compile(pattern)
    for pattern in (
        r"translation rule for primitive '(?P<operation>[\w.-]+)' not found",
        r"No FFI handler registered for (?P<operation>[\w.$-]+)",
        r"Custom emitter for (?P<operation>[\w.$-]+) not found",
        # %dot_general.1 = s64[64,64]{1,0} dot(...)
        r"rewriting is not implemented: %\S+ = \S+ (?P<operation>[\w-]+)\(",
        r"Unexpected operand type for (?P<operation>\w+)",
    )
)
"""Patterns of errors of JAX's lowering, and of the compilers of CUDA and of TPUs behind it."""

_LOCATION = re.compile(r"Suspected Python Code Location:\s+(?P<place>/[^\s:]+:\d+)")


def problem_of(error: BaseException) -> Problem:
    """Return the problem behind an exception of a lowering or a compilation."""
    text = str(error) or type(error).__name__
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    if len(reason) > _MAX_CHARACTERS:
        reason = f"{reason[:_MAX_CHARACTERS]}..."
    found = (match["operation"] for pattern in _OPERATIONS if (match := pattern.search(text)))
    location = _LOCATION.search(text)
    return Problem(reason, next(found, ""), location["place"] if location else "")
