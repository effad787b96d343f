"""Which operation a compiler has no way for, and the author's line, from what JAX and XLA say."""

import re
from collections.abc import Iterator, Sequence

from xlaserve.models.targets.jobs import Problem

_MAX_CHARACTERS = 300

_OPERATIONS = tuple(
    map(
        re.compile,
        (
            # Of JAX, on its way to StableHLO.
            r"MLIR translation rule for primitive '(?P<operation>[\w.-]+)' not found",
            r"custom call target (?:name )?['\"]?(?P<operation>[\w.$-]+)",
            # Of XLA.
            r"implementation for (?:untyped )?custom call to ['\"]?(?P<operation>[\w.$-]+)",
            r'custom_call_target="(?P<operation>[^"]+)"',
            r"HLO opcode `?(?P<operation>[\w.-]+)`? is not supported",
            r"Unhandled opcode:? (?P<operation>[\w.-]+)",
            r"(?:failed to legalize operation|op) '(?P<operation>[\w.-]+)'",
            r"X64 rewriting.*? (?P<operation>[\w.-]+)\(",
            r"%(?P<operation>[a-z][\w-]*?)(?:\.\d+)? = ",
        ),
    )
)
"""In the order in which they are tried."""

_LOCATIONS = (
    re.compile(r'source_file="(?P<file>[^"]+)" source_line=(?P<line>\d+)'),
    re.compile(r'loc\("(?P<file>[^"]+\.py)":(?P<line>\d+)'),
    re.compile(r'(?:^|[\s("])(?P<file>[\w./-]+\.py):(?P<line>\d+)'),
)
_NOT_THE_AUTHORS = ("/jax/", "/jaxlib/", "/xlaserve/")


def problem_of(error: BaseException) -> Problem:
    """Return what is to be told of an exception of a lowering or a compilation."""
    text = str(error) or type(error).__name__
    return Problem(_reason(text), _operation(text), _location(text))


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[0] if lines else text
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}..."


def _operation(text: str) -> str:
    found = (match["operation"] for pattern in _OPERATIONS for match in pattern.finditer(text))
    return next(found, "")


def _location(text: str) -> str:
    return next(_locations(text, _LOCATIONS), "")


def _locations(text: str, patterns: Sequence[re.Pattern[str]]) -> Iterator[str]:
    for pattern in patterns:
        for match in pattern.finditer(text):
            if not any(part in match["file"] for part in _NOT_THE_AUTHORS):
                yield f"{match['file']}:{match['line']}"
