"""Incremental search for stop strings in streamed text."""

from collections.abc import Sequence

from xlaserve.errors import InvalidParameter

MOST_STOPS = 16
"""Maximum number of stop strings per request."""
MOST_CHARACTERS = 1024
"""Maximum length of a stop string."""


class StopStrings:
    """Passes text through up to the first stop string, holding back possible beginnings of one.

    The stop string that is completed first ends the text; if several are completed by the same
    character, the longest does. The result does not depend on how the text is split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidParameter for too many strings, or for an empty or too long one."""
        if len(stops) > MOST_STOPS:
            raise InvalidParameter("stop", f"at most {MOST_STOPS} strings", f"{len(stops)}")
        for stop in stops:
            if not 1 <= len(stop) <= MOST_CHARACTERS:
                expected = f"strings of 1 to {MOST_CHARACTERS} characters"
                raise InvalidParameter("stop", expected, f"one of {len(stop)}")
        self.found: str | None = None
        """The stop string that ended the text, or None."""
        # Longest first: it wins if several are completed together.
        ordered = sorted(set(stops), key=len, reverse=True)
        self._stops = [(stop, _failures(stop)) for stop in ordered]
        self._states = [0] * len(ordered)
        """Length of the prefix of each stop string that the text ends with."""
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that cannot be part of a stop string."""
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
        """Return the text held back, which turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, letter: str) -> bool:
        """Process a character; return whether it completes a stop string.

        Uses the Knuth-Morris-Pratt algorithm: constant amortized time per character.
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
    """Return the KMP failure function: for each prefix, the length of its longest border."""
    found = [0] * len(stop)
    state = 0
    for index in range(1, len(stop)):
        while state and stop[state] != stop[index]:
            state = found[state - 1]
        state += stop[state] == stop[index]
        found[index] = state
    return found
