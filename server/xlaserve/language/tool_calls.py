"""Incremental parser of tool calls in a streamed answer.

The result does not depend on how the text is split: each character is processed once, in order. A
call that has been sent cannot be revoked; so it is held back until its name is a known tool and its
arguments begin, and becomes text if it turns out not to be a call.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from xlaserve.language.json_following import JsonFollower

MOST_HELD = 1 << 14
"""Maximum number of characters held back because they may form a call; beyond it they are output as
text."""

_MOST_SPACE = 256
"""Maximum number of whitespace characters held back where a call may follow."""
_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\n\r"


@dataclass(slots=True)
class CallDelta:
    """An increment of a tool call."""

    index: int
    """Index of the call within the answer."""
    name: str | None
    """Name of the tool; only in the first increment of a call."""
    arguments: str
    """Next part of the arguments' JSON, as written by the model."""


@dataclass(slots=True)
class Parsed:
    """Text and tool calls newly parsed from an answer."""

    text: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, index: int, name: str | None, arguments: str) -> None:
        """Add an increment, merging it with the previous one of the same call."""
        if name is None and self.calls and self.calls[-1].index == index:
            self.calls[-1].arguments += arguments
        else:
            self.calls.append(CallDelta(index, name, arguments))


class _Call:
    """A JSON object that may be a call, from its first brace on."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        self._json = JsonFollower()
        self._key = ""
        self._value = ""
        self._name: str | None = None
        self._arguments = ""
        """Arguments not yet sent."""
        self._is_arguments = False
        self._has_arguments = False
        self.has_begun = False

    @property
    def is_over(self) -> bool:
        """Tell whether the object is complete."""
        return self._json.is_over

    def push(self, letter: str) -> bool:
        """Consume a character; return False if the text is not a call or not valid JSON."""
        before, was_key, was_value = self._json.depth, self._json.is_key, not self._is_between
        if not self._json.push(letter):
            return False
        if self._is_arguments:
            self._arguments += letter
            self._is_arguments = self._json.depth > 1
        elif before == 1 and not self.has_begun:
            self._push_member(letter, was_key=was_key, was_value=was_value)
            if self._json.depth > 1 and self._key in _ARGUMENTS and not self._has_arguments:
                if letter != "{":
                    return False
                self._is_arguments, self._has_arguments, self._arguments = True, True, letter
        if self._name is not None and self._name not in self._tools:
            return False
        self.has_begun = self.has_begun or (self._name is not None and self._has_arguments)
        return self.has_begun or not self.is_over

    @property
    def _is_between(self) -> bool:
        return self._json.is_before_value or self._json.is_after_value

    def _push_member(self, letter: str, *, was_key: bool, was_value: bool) -> None:
        """Process a top-level member: its key, and its value if that is a string."""
        if self._json.is_key:
            self._key = self._key + letter if was_key else letter
        elif was_key:
            self._key, self._value = _text(self._key + letter) or "", ""
        elif self._key == "name" and self._name is None and not self._json.is_before_value:
            self._value += letter
            if was_value and self._json.is_after_value:
                self._name = _text(self._value) or ""

    def take(self) -> tuple[str | None, str]:
        """Return the name, and the arguments not yet sent."""
        found, self._arguments = self._arguments, ""
        return self._name, found


def _text(written: str) -> str | None:
    try:
        found = json.loads(written)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


class ToolCalls:
    """Parser for models that write each tool call as a JSON object."""

    def __init__(self, tools: Collection[str], begin: str, end: str, most: int) -> None:
        """`tools` are the names that may be called; `most` is the maximum number of calls.

        Each call is between `begin` and `end`, anywhere in the answer. If `end` is empty, the
        answer starts with calls, each optionally preceded by `begin`, separated by `;`.
        """
        self._tools = tools
        self._begin, self._end = begin, end
        self.marks = tuple(filter(None, (begin, end)))
        """The marks that must be visible in the text, even if they are special tokens."""
        self._most = most
        self._state = self._in_text if end else self._before_call
        self._call: _Call | None = None
        self._held = ""
        """Text that may be the beginning of a call or mark."""
        self._space = ""
        """Whitespace that is sent only if text follows."""
        self._found = Parsed()
        self.count = 0
        """Number of calls that have begun."""
        self.is_complete = False
        """Whether the maximum number of calls has been completed."""

    def push(self, text: str) -> Parsed:
        """Parse more text."""
        self._feed(text)
        return self._taken()

    def end(self) -> Parsed:
        """Return the remaining text and calls; nothing may be pushed afterwards."""
        held, self._held = self._held, ""
        if self._state == self._broken:
            self._found.add(self.count - 1, None, held)
        elif not self.count or held.strip(_SPACE + ";"):
            self._write(held)
        if not self.count:
            self._found.text.append(self._space)
        self._space = ""
        return self._taken()

    def _taken(self) -> Parsed:
        found, self._found = self._found, Parsed()
        return found

    def _feed(self, text: str) -> None:
        # Text that turns out not to be a call is processed again from its second character on.
        letters: list[str] = list(reversed(text))
        while letters and not self.is_complete:
            again = self._state(letters.pop())
            letters.extend(reversed(again))

    def _write(self, text: str) -> None:
        """Output text; hold back trailing whitespace, which is dropped before a call."""
        whole = self._space + text
        rest = whole.rstrip(_SPACE) if len(whole) <= _MOST_SPACE else whole
        self._found.text.append(rest)
        self._space = whole[len(rest) :]

    # --- states: each processes a character, and returns the text to process again ---

    def _in_text(self, letter: str) -> str:
        held = self._held + letter
        while held and not self._begin.startswith(held):
            self._write(held[0])
            held = held[1:]
        self._held = held
        if held == self._begin:
            self._state = self._before_object
        return ""

    def _as_text(self, letter: str) -> str:
        self._write(letter)
        return ""

    def _before_object(self, letter: str) -> str:
        self._held += letter
        if letter == "{":
            return self._start()
        return "" if letter in _SPACE and len(self._held) <= _MOST_SPACE else self._give_up()

    def _before_call(self, letter: str) -> str:
        """Expect the first call, or another one."""
        self._held += letter
        said = self._held.lstrip(_SPACE + (";" if self.count else ""))
        if said.startswith(self._begin):
            said = said[len(self._begin) :].lstrip(_SPACE)
        if said == "{":
            return self._start()
        is_possible = not said or (self._begin.startswith(said) and bool(self._begin))
        return "" if is_possible and len(self._held) <= _MOST_SPACE else self._give_up()

    def _start(self) -> str:
        self._call = _Call(self._tools)
        self._call.push("{")
        self._state = self._in_call
        return ""

    def _in_call(self, letter: str) -> str:
        call = self._call
        assert call is not None
        had_begun = call.has_begun
        if not call.push(letter):
            if had_begun:
                self._found.add(self.count - 1, None, letter)
                self._state = self._broken
                return ""
            self._held += letter
            return self._give_up()
        if not call.has_begun:
            self._held += letter
            return "" if len(self._held) <= MOST_HELD else self._give_up()
        name, arguments = call.take()
        if not had_begun:
            self._held = self._space = ""
            self.count += 1
            self._found.add(self.count - 1, name, arguments)
        elif arguments:
            self._found.add(self.count - 1, None, arguments)
        if call.is_over:
            self.is_complete = self.count == self._most
            self._call = None
            self._state = self._between if self._end else self._before_call
        return ""

    def _between(self, letter: str) -> str:
        """Expect the end mark of a call."""
        self._held += letter
        said = self._held.lstrip(_SPACE)
        if said == self._end:
            self._held, self._state = "", self._in_text
        elif not self._end.startswith(said) or len(self._held) > _MOST_SPACE:
            again, self._held, self._state = self._held, "", self._in_text
            return again
        return ""

    def _broken(self, letter: str) -> str:
        """Output the rest of a call with invalid JSON, up to its end mark."""
        held = self._held + letter
        while held and not self._end.startswith(held):
            self._found.add(self.count - 1, None, held[0])
            held = held[1:]
        if not self._end:
            held = ""
        self._held = held
        if self._end and held == self._end:
            self._held, self._call, self._state = "", None, self._in_text
            self.is_complete = self.count == self._most
        return ""

    def _give_up(self) -> str:
        """Output the held-back text as text."""
        held, self._held, self._call = self._held, "", None
        if not self._end:
            self._state = self._as_text
            return held
        self._state = self._in_text
        self._write(held[0])
        return held[1:]


def joined(parts: Sequence[Parsed]) -> tuple[str, list[tuple[str, str]]]:
    """Return the whole text, and name and arguments of each call."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        for delta in part.calls:
            if delta.name is not None:
                calls.append((delta.name, delta.arguments))
            else:
                name, before = calls[delta.index]
                calls[delta.index] = name, before + delta.arguments
    return "".join(text for part in parts for text in part.text), calls
