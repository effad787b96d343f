"""The state of `xlaserve top`: rows, order, selection, and its keys."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from xlaserve.cli.top.rates import Rates

_MOST_WORDS = 80
_PAGE = 10


class Key(StrEnum):
    """The columns by which models are sorted: names ascending, all others descending."""

    RATE = "rate"
    FAILED = "failed"
    LATENCY = "latency"
    QUEUE = "queue"
    MEMORY = "memory"
    NAME = "name"


_ORDER: Mapping[Key, Callable[[Rates], float]] = {
    Key.RATE: lambda row: row.rate,
    Key.FAILED: lambda row: row.failed,
    Key.LATENCY: lambda row: row.latency,
    Key.QUEUE: lambda row: row.queue,
    Key.MEMORY: lambda row: row.memory,
    Key.NAME: lambda row: 0.0,
}
_SORTS: Mapping[str, Key] = {
    "r": Key.RATE,
    "f": Key.FAILED,
    "l": Key.LATENCY,
    "u": Key.QUEUE,
    "m": Key.MEMORY,
    "n": Key.NAME,
}
_MOVES: Mapping[str, int] = {
    "up": -1,
    "k": -1,
    "down": 1,
    "j": 1,
    "page up": -_PAGE,
    "page down": _PAGE,
}


@dataclass(slots=True)
class View:
    """The state of the view, changed by keys; used only on the event loop."""

    sort: Key = Key.RATE
    reverse: bool = False
    words: str = ""
    """Filter for names of models, which must contain it; empty for all."""
    typing: bool = False
    """Whether characters are added to the filter."""
    paused: bool = False
    rows: list[Rates] = field(default_factory=list[Rates])
    """The most recent rates; while paused, the last rates from before the pause."""
    chosen: tuple[str, str] | None = None
    """Name and version of the selected row; None for the first row."""
    detail: tuple[str, str] | None = None
    """Name and version of the model whose details are shown; None for the list."""
    scrolled: int = 0
    """Number of lines that are scrolled off the top of the details."""
    ended: bool = False

    def update(self, rows: Sequence[Rates]) -> None:
        """Store new rates, unless the view is paused."""
        if not self.paused:
            self.rows = list(rows)

    def shown(self) -> list[Rates]:
        """Return the rows that match the filter, sorted."""
        words = self.words.lower()
        found = sorted(
            (row for row in self.rows if words in row.name.lower()),
            key=lambda row: (row.name, row.version),
            reverse=self.reverse and self.sort is Key.NAME,
        )
        order = _ORDER[self.sort]
        largest_first = not self.reverse
        # Sorting is stable, so equal rows remain ordered by name.
        return (
            found
            if self.sort is Key.NAME
            else sorted(found, key=lambda row: -order(row) if largest_first else order(row))
        )

    def place(self, rows: Sequence[Rates]) -> int:
        """Return the index of the selected row, or 0 if it has disappeared."""
        places = (at for at, row in enumerate(rows) if (row.name, row.version) == self.chosen)
        return next(places, 0)

    def press(self, key: str) -> None:
        """Handle a key; unknown keys are ignored."""
        if self.typing:
            self._type(key)
        elif key in _MOVES:
            self._move(_MOVES[key])
        elif key in _SORTS and self.detail is None:
            again = self.sort is _SORTS[key]
            self.sort, self.reverse = _SORTS[key], again and not self.reverse
        else:
            _KEYS.get(key, View._nothing)(self)

    def _type(self, key: str) -> None:
        if key in ("enter", "escape"):
            self.typing = False
            if key == "escape":
                self.words = ""
        elif key == "backspace":
            self.words = self.words[:-1]
        elif len(key) == 1:
            self.words = (self.words + key)[:_MOST_WORDS]

    def _move(self, by: int) -> None:
        if self.detail is not None:
            self.scrolled = max(self.scrolled + by, 0)
            return
        rows = self.shown()
        if rows:
            row = rows[min(max(self.place(rows) + by, 0), len(rows) - 1)]
            self.chosen = row.name, row.version

    def _filter(self) -> None:
        self.typing = self.detail is None

    def _pause(self) -> None:
        self.paused = not self.paused

    def _open(self) -> None:
        rows = self.shown()
        if self.detail is None and rows:
            row = rows[self.place(rows)]
            self.chosen = self.detail = row.name, row.version
            self.scrolled = 0

    def _back(self) -> None:
        if self.detail is None:
            self.words = ""
        self.detail = None

    def _quit(self) -> None:
        self.ended = True

    def _nothing(self) -> None:
        pass


_KEYS: Mapping[str, Callable[[View], None]] = {
    "/": View._filter,
    " ": View._pause,
    "p": View._pause,
    "enter": View._open,
    "escape": View._back,
    "backspace": View._back,
    "q": View._quit,
}
