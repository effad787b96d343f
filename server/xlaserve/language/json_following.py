"""Incremental JSON parser that validates one character at a time."""

import re

_SPACE = " \t\n\r"
_WORD = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD_LETTERS = frozenset("+-.0123456789Eaeflnrstu")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_HEX_DIGITS = 4
_MOST_DEPTH = 64
_MOST_WORD = 512
_CLOSING = {"}": "{", "]": "["}


class JsonFollower:
    """Tracks one JSON object: its nesting depth, and whether it is still valid."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._expects = "value"
        """Expected input: value, first value, first key, key, colon, after, string, escape, hex, or
        word.
        """
        self._is_key = False
        self._hex = 0
        self._word = ""
        self.is_over = False
        """Whether the object is complete."""

    @property
    def depth(self) -> int:
        """Return the number of open objects and arrays."""
        return len(self._open)

    @property
    def is_key(self) -> bool:
        """Tell whether the position is within a key."""
        return self._is_key and self._expects in ("string", "escape", "hex")

    @property
    def is_before_value(self) -> bool:
        """Tell whether a value comes next, or the colon before it."""
        return self._expects in ("colon", "value")

    @property
    def is_after_value(self) -> bool:
        """Tell whether a value has just ended."""
        return self._expects == "after"

    def push(self, letter: str) -> bool:
        """Consume a character; return False if it makes the JSON invalid."""
        expects = self._expects
        if expects in ("string", "escape", "hex"):
            return self._push_text(letter)
        if expects == "word":
            if letter in _WORD_LETTERS and len(self._word) < _MOST_WORD:
                self._word += letter
                return True
            if not _WORD.fullmatch(self._word):
                return False
            self._expects = "after"
        return letter in _SPACE or self._push_mark(letter)

    def _push_mark(self, letter: str) -> bool:
        if self._expects == "after":
            return self._push_after(letter)
        if self._expects == "colon":
            self._expects = "value"
            return letter == ":"
        if self._expects in ("first key", "key"):
            return self._push_key(letter)
        return self._push_value(letter)

    def _push_text(self, letter: str) -> bool:
        if self._expects == "hex":
            self._hex -= 1
            self._expects = "hex" if self._hex else "string"
            return letter in _HEX
        if self._expects == "escape":
            self._expects, self._hex = ("hex", _HEX_DIGITS) if letter == "u" else ("string", 0)
            return letter == "u" or letter in _ESCAPES
        if letter == "\\":
            self._expects = "escape"
        elif letter == '"':
            self._expects = "colon" if self._is_key else "after"
        return letter >= " "

    def _push_key(self, letter: str) -> bool:
        if letter == "}" and self._expects == "first key":
            return self._close(letter)
        self._expects, self._is_key = "string", True
        return letter == '"'

    def _push_value(self, letter: str) -> bool:
        if letter == "]" and self._expects == "first value":
            return self._close(letter)
        if letter in "{[":
            self._open.append(letter)
            self._expects = "first key" if letter == "{" else "first value"
            return len(self._open) <= _MOST_DEPTH
        if letter == '"':
            self._expects, self._is_key = "string", False
            return bool(self._open)
        self._expects, self._word = "word", letter
        return bool(self._open) and letter in _WORD_LETTERS

    def _push_after(self, letter: str) -> bool:
        if letter == ",":
            self._expects = "key" if self._open[-1] == "{" else "value"
            return True
        return letter in _CLOSING and self._close(letter)

    def _close(self, letter: str) -> bool:
        if self._open.pop() != _CLOSING[letter]:
            return False
        self._expects = "after"
        self.is_over = not self._open
        return True
