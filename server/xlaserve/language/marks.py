"""Marks in client text that prevent special tokens from being recognized there.

A mark is inserted after the first character of each special token spelled in client text, so that
the tokenizer does not find it. The tokenizer's normalizer then removes the marks, and the
characters are tokenized as plain text. This works wherever a template puts the client's text.
"""

import re
from collections.abc import Iterable
from itertools import groupby, pairwise, takewhile
from typing import Any

# Unicode noncharacters, which are reserved for internal use.
_BEGIN = "\ufdd0"
_BREAK = _BEGIN + "\ufdd2"
_ESCAPED = _BEGIN + "\ufdd1"

NORMALIZERS = (
    {"type": "Replace", "pattern": {"String": _BREAK}, "content": ""},
    {"type": "Replace", "pattern": {"String": _ESCAPED}, "content": _BEGIN},
)
"""Normalizers that remove the marks, as in `tokenizer.json`."""

MOST_DEPTH = 64
"""Maximum nesting depth of messages and tools."""


class Marks:
    """Marks special tokens of one tokenizer in client text."""

    def __init__(self, special: Iterable[str]) -> None:
        words = frozenset(filter(None, special))
        # A lookahead, to find special tokens that overlap.
        self._spelled = re.compile(f"(?={_pattern(words)})" if words else r"(?!)")
        self._beginnings = frozenset(word[:size] for word in words for size in range(1, len(word)))
        self._longest = max(map(len, words), default=0)

    def text(self, text: str) -> str:
        """Insert marks into all special tokens in a text.

        Also marks a prefix of a special token at the end of the text, which the template might
        complete.
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
        """Mark all strings in plain JSON data, including keys.

        Raises ValueError if the data is nested too deeply.
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
    """Remove the marks from a text."""
    return text.replace(_BREAK, "").replace(_ESCAPED, _BEGIN)


def _pattern(words: Iterable[str]) -> str:
    """Return a pattern that matches any of the words and examines each character once (a trie).

    Simple alternatives would examine a prefix shared by hundreds of words once for each of them.
    """
    parts = []
    for _, group in groupby(sorted(words), key=lambda word: word[:1]):
        listed = list(group)
        # The words are sorted, so the common prefix of the first and last is common to all.
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(listed[0], listed[-1], strict=False))
        start = "".join(letter for letter, _ in alike)
        rest = [word[len(start) :] for word in listed]
        # If a word is a prefix of the others, matching it is sufficient.
        parts.append(re.escape(start) + ("" if "" in rest else _pattern(rest)))
    return f"(?:{'|'.join(parts)})"
