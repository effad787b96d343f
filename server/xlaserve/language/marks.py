"""Marks within the text of clients, which keep special tokens in it from being special.

A mark is put after the first character of each special token that a client spells, so that the
tokenizer does not find it; the tokenizer's normalizer then takes the marks out of what is left,
and the characters become tokens like any others. A template may put text of clients anywhere.
"""

import re
from collections.abc import Iterable
from itertools import groupby, pairwise, takewhile
from typing import Any

# No characters: Unicode keeps them for the inside of programs (noncharacters).
_BEGIN = "\ufdd0"
_BREAK = _BEGIN + "\ufdd2"
_ESCAPED = _BEGIN + "\ufdd1"

NORMALIZERS = (
    {"type": "Replace", "pattern": {"String": _BREAK}, "content": ""},
    {"type": "Replace", "pattern": {"String": _ESCAPED}, "content": _BEGIN},
)
"""The normalizer that takes the marks out again, as `tokenizer.json` writes it."""

MOST_DEPTH = 64
"""The deepest that messages and tools may be nested."""


class Marks:
    """Marks the special tokens of one tokenizer."""

    def __init__(self, special: Iterable[str]) -> None:
        words = frozenset(filter(None, special))
        # A special token may begin within another one, so they are looked for at every place.
        self._spelled = re.compile(f"(?={_pattern(words)})" if words else r"(?!)")
        self._beginnings = frozenset(word[:size] for word in words for size in range(1, len(word)))
        self._longest = max(map(len, words), default=0)

    def text(self, text: str) -> str:
        """Return a text with marks in what it spells of special tokens.

        Also in the beginning of one that the text ends with: the template may put the rest behind.
        """
        text = text.replace(_BEGIN, _ESCAPED)
        places = [found.start() for found in self._spelled.finditer(text)]
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                places.append(len(text) - size)
        if not places:
            return text
        cuts = [0, *(place + 1 for place in sorted(set(places))), len(text)]
        return _BREAK.join(text[begin:end] for begin, end in pairwise(cuts))

    def data(self, data: Any, depth: int = 0) -> Any:
        """Return plain JSON data with all of its strings marked, the names of fields too.

        Raises ValueError for what is nested too deeply.
        """
        if depth > MOST_DEPTH:
            raise ValueError(f"expected messages and tools nested at most {MOST_DEPTH} deep")
        if isinstance(data, str):
            return self.text(data)
        if isinstance(data, dict):
            return {
                self.text(str(name)): self.data(value, depth + 1) for name, value in data.items()
            }
        if isinstance(data, (list, tuple)):
            return [self.data(value, depth + 1) for value in data]
        return data


def unmarked(text: str) -> str:
    """Return a text as it was before it was marked."""
    return text.replace(_BREAK, "").replace(_ESCAPED, _BEGIN)


def _pattern(words: Iterable[str]) -> str:
    """Return a pattern for any of the words, which looks at each character of a text once.

    An alternative for each word would look at the beginning that hundreds of them share as often.
    """
    parts = []
    for _, group in groupby(sorted(words), key=lambda word: word[:1]):
        listed = list(group)
        # Sorted: what the first and the last begin with alike, all others do.
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(listed[0], listed[-1], strict=False))
        start = "".join(letter for letter, _ in alike)
        rest = [word[len(start) :] for word in listed]
        # A word that is the beginning of others is enough: whatever follows, it is there.
        parts.append(re.escape(start) + ("" if "" in rest else _pattern(rest)))
    return f"(?:{'|'.join(parts)})"
