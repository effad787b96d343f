"""Checks the English of captions, docstrings, errors and documentation for known bad habits.

    python tools/prose.py

Prints each finding with its location and the remedy, and exits with 1 if there are any. `HABITS` is
the table of patterns: one is added once the repository has no match left.
"""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS = 15
"""Maximum words of a module's caption, not counting references in parentheses."""


class Kind(Flag):
    """Kinds of text."""

    CAPTION = auto()
    """First sentence of a module's docstring."""
    DOCSTRING = auto()
    """First line of any docstring."""
    ERROR = auto()
    """Text of an exception."""
    PAGE = auto()
    """Paragraph, item or table row of a Markdown page, but no heading or code."""
    ANY = CAPTION | DOCSTRING | ERROR | PAGE


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text and its location."""

    kind: Kind
    file: Path
    line: int
    words: str


@dataclass(frozen=True, slots=True)
class Habit:
    """A pattern that marks odd English wherever it matches."""

    pattern: str
    remedy: str
    kinds: Kind = Kind.ANY


HABITS = (
    Habit(
        r"(?:^|[.:;] |^\| |^- )What (?:is|are|was|were|has|have|had|does|did|comes|it|they)\b"
        r"(?![^.|]*\?)",
        "begin with the thing itself, not with a clause: 'A request that ...'",
    ),
    Habit(
        r"\bwhat (?:is|are|was|were|has|have|had|it|they|the|a)\b",
        "name the thing",
        Kind.CAPTION,
    ),
    Habit(r"\bany more\b", "no longer; or drop the history"),
    Habit(r"\bsince then\b", "say how it is now"),
    Habit(r"(?<!is )(?<!are )(?<!be )(?<!was )(?<!were )\bused to\b", "say how it is now"),
    Habit(r"\b[Ww]anted (?:is|are|was|were)\b", "the target is"),
    Habit(r"\bcall(?:s|ed|ing)? off\b", "cancel"),
    Habit(r"\bstand(?:s|ing)? in line\b", "wait in the queue"),
    Habit(r"\b[Ll]et(?:s|ting)? go of\b", "release"),
    Habit(r"\b(?:is|are|be) let in\b", "admitted"),
    Habit(r"\bof before\b", "former, previous"),
    Habit(r"\bgone on with\b", "continued"),
)


def findings(text: Text) -> Iterator[str]:
    """Yield the findings in a text, with their location."""
    place = f"{text.file}:{text.line}"
    if text.kind is Kind.CAPTION:
        count = len(re.sub(r"\s*\([^()]*\)", "", text.words).split())
        if count > MOST_WORDS:
            yield f"{place}: caption of {count} words, expected at most {MOST_WORDS}"
    for habit in HABITS:
        found = re.search(habit.pattern, text.words) if text.kind & habit.kinds else None
        if found:
            yield f"{place}: '{found[0].strip('.:;|- ')}': {habit.remedy}"


def in_module(source: str, file: Path) -> Iterator[Text]:
    """Yield the caption, the docstrings' first lines and the texts of exceptions."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            first = text.partition("\n\n")[0].replace("\n", " ")
            yield Text(Kind.DOCSTRING, file, getattr(node, "lineno", 1), first)
            if isinstance(node, ast.Module):
                yield Text(Kind.CAPTION, file, 1, re.split(r"(?<=[.!?])\s", first)[0])
        elif isinstance(node, ast.Raise) or _is_error_text(node):
            yield from _strings(node, file)


def _is_error_text(node: ast.AST) -> bool:
    """Tell whether a node calls `super().__init__(...)`, with which errors build their texts."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "__init__"
        and isinstance(node.func.value, ast.Call)
    )


def _strings(node: ast.AST, file: Path) -> Iterator[Text]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield Text(Kind.ERROR, file, part.lineno, part.value)


def in_page(page: str, file: Path) -> Iterator[Text]:
    """Yield the lines of a Markdown page, except headings, code blocks and code spans."""
    is_code = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith(("#", "    ")):
            yield Text(Kind.PAGE, file, number, re.sub(r"`[^`]*`", "`code`", line))


def texts(root: Path) -> Iterator[Text]:
    """Yield every text of the repository to be checked."""
    for file in sorted((root / "server").rglob("*.py")):
        yield from in_module(file.read_text(), file.relative_to(root))
    for file in (*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))):
        yield from in_page(file.read_text(), file.relative_to(root))
    for file in sorted((root / "server").rglob("*.md")):
        yield from in_page(file.read_text(), file.relative_to(root))


def main(arguments: Sequence[str] = ()) -> int:
    """Print the findings below a root, by default the repository; return the exit status."""
    found = [
        line for text in texts(Path(*arguments) if arguments else ROOT) for line in findings(text)
    ]
    print("\n".join(dict.fromkeys(found)) or "no finding")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
