"""Stop strings, found in a text that comes piece by piece."""

from collections.abc import Sequence

from xlaserve.errors import InvalidParameter

MOST_STOPS = 16
"""Stop strings that a request may have."""
MOST_CHARACTERS = 1024
"""The longest of them."""


class StopStrings:
    """Lets text through until a stop string is in it, and holds back what may begin one.

    The stop string that is complete first ends the text, and of several that are complete with the
    same character the longest: how the text was cut into pieces changes nothing.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidParameter for too many, an empty one, or one that is too long."""
        if len(stops) > MOST_STOPS:
            raise InvalidParameter("stop", f"at most {MOST_STOPS} strings", f"{len(stops)}")
        for stop in stops:
            if not 1 <= len(stop) <= MOST_CHARACTERS:
                expected = f"strings of 1 to {MOST_CHARACTERS} characters"
                raise InvalidParameter("stop", expected, f"one of {len(stop)}")
        self.found: str | None = None
        """The stop string that ended the text; None while there is none."""
        # The longest first: it is looked at first when several are complete.
        ordered = sorted(set(stops), key=len, reverse=True)
        self._stops = [(stop, _failures(stop)) for stop in ordered]
        self._states = [0] * len(ordered)
        """How many characters of each the text ends with."""
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text in which no stop string can still begin."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        for index in range(len(self._held), len(held)):
            if self._advance(held[index]):
                assert self.found is not None
                self._held = ""
                return held[: index + 1 - len(self.found)]
        keep = len(held) - max(self._states)
        self._held = held[keep:]
        return held[:keep]

    def end(self) -> str:
        """Return what was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _advance(self, letter: str) -> bool:
        """Note a character, and tell whether a stop string is complete with it.

        Each is looked for as Knuth, Morris and Pratt do: a character costs a few steps, however
        long what is held back.
        """
        for index, (stop, failures) in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != letter:
                state = failures[state - 1]
            state += stop[state] == letter
            self._states[index] = state
            if state == len(stop):
                self.found = stop
                return True
        return False


def _failures(stop: str) -> list[int]:
    """Return for each prefix the length of the longest end of it that also begins it."""
    found = [0] * len(stop)
    state = 0
    for index in range(1, len(stop)):
        while state and stop[state] != stop[index]:
            state = found[state - 1]
        state += stop[state] == stop[index]
        found[index] = state
    return found
