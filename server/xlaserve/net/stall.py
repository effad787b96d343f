"""Detects clients that have stopped reading."""


class Stall:
    """Counts consecutive checks of a connection without progress in sending pending bytes."""

    __slots__ = ("_checks", "_seen")

    def __init__(self) -> None:
        self._checks = 0
        self._seen: object = None

    def look(self, seen: object, *, waits: bool) -> int:
        """Return the number of checks since the last progress, or since nothing was pending.

        `seen` is a value that changes whenever bytes are sent, and seldom otherwise; `waits` tells
        whether any are pending.
        """
        if not waits or seen != self._seen:
            self._seen = seen
            self._checks = 0
        else:
            self._checks += 1
        return self._checks


CHECKS = 8
"""Number of checks within the time that a client has to read."""
