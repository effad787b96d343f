"""Clients that do not read: how long their queued bytes have not moved."""


class Stall:
    """Counts consecutive checks of a connection at which pending bytes had not moved."""

    __slots__ = ("_looks", "_seen")

    def __init__(self) -> None:
        self._looks = 0
        self._seen: object = None

    def look(self, seen: object, *, waits: bool) -> int:
        """Return how many looks ago the last bytes left, or nothing waited.

        `seen` differs from what it was whenever bytes have left, and seldom else.
        """
        if not waits or seen != self._seen:
            self._seen = seen
            self._looks = 0
        else:
            self._looks += 1
        return self._looks


LOOKS = 8
"""Checks of a connection within the client's read timeout."""
