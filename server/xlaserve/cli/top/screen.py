"""Rendering of `xlaserve top` for the size of a terminal."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from xlaserve.cli.asking.models_display import model_lines
from xlaserve.cli.printable import printable
from xlaserve.cli.sizes import format_bytes
from xlaserve.cli.top.rates import Rates
from xlaserve.cli.top.view import Key, View
from xlaserve.dialing.interface import Json

_MARKED, _PLAIN = "\x1b[7m", "\x1b[0m"
_LEAST_NAME = 14
_LIST_KEYS = "q quit  / filter  space pause  enter detail  sort: r f l u m n, again: reverse"
_DETAIL_KEYS = "q quit  escape back  up, down scroll  space pause"
_WORDS_KEYS = "enter keep  escape clear"


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    width: int
    text: Callable[[Rates], str]
    sort: Key | None = None


def _number(value: float) -> str:
    return f"{value:.4g}" if value else ""


_COLUMNS: tuple[_Column, ...] = (
    _Column("answers/s", 9, lambda row: _number(row.rate), Key.RATE),
    _Column("failed/s", 8, lambda row: _number(row.failed), Key.FAILED),
    _Column("ms", 7, lambda row: _number(row.latency), Key.LATENCY),
    _Column("memory", 8, lambda row: format_bytes(row.memory) if row.memory else "", Key.MEMORY),
    _Column("queue ms", 8, lambda row: _number(row.queue), Key.QUEUE),
    _Column("version", 7, lambda row: printable(row.version)),
    _Column("rows", 6, lambda row: _number(row.rows)),
)
"""Columns after the names, from the most to the least important."""


def table(rows: Sequence[Rates], sort: Key, columns: int | None) -> list[str]:
    """Return a heading and a line for each row; names are not truncated if `columns` is None."""
    names = [printable(row.name) for row in rows]
    longest = max(map(cell_len, (*names, "model")))
    shown = _COLUMNS
    if columns is not None:
        while len(shown) > 1 and _width(shown) + min(longest, _LEAST_NAME) > columns:
            shown = shown[:-1]
        longest = min(longest, max(columns - _width(shown), 1))
    head = _sized("model" + (" *" if sort is Key.NAME else ""), longest) + "".join(
        f" {each.heading + ('*' if each.sort is sort else ''):>{each.width}}" for each in shown
    )
    return [
        head,
        *(
            _sized(name, longest) + "".join(f" {each.text(row):>{each.width}}" for each in shown)
            for name, row in zip(names, rows, strict=True)
        ),
    ]


def frame(view: View, head: str, facts: Json | str | None, size: tuple[int, int]) -> list[str]:
    """Return the lines of a screen of this many columns and lines.

    `facts` are the details of the selected model, or an error text; None while they are loading.
    """
    columns, lines = size
    if view.paused:
        head = f"paused  {head}"
    top = [_cut(printable(head), columns)]
    body, keys = (
        (_list(view, columns, lines - 3), _LIST_KEYS)
        if view.detail is None
        else (_detail(view, facts, columns, lines - 3), _DETAIL_KEYS)
    )
    if view.typing:
        keys = f"filter: {printable(view.words)}_  {_WORDS_KEYS}"
    elif view.words and view.detail is None:
        keys = f"filter: {printable(view.words)}  {keys}"
    room = max(lines - 2, 0)
    filled = [*body[:room], *[""] * (room - len(body))]
    return [*top, *filled, _cut(keys, columns)][:lines]


def _list(view: View, columns: int, room: int) -> list[str]:
    rows = view.shown()
    if not rows:
        return ["no matching model" if view.words else "no models are loaded"]
    place = view.place(rows)
    # Keep the selected row on the screen.
    first = max(place - max(room, 1) + 1, 0)
    head, *found = table(rows[first : first + max(room, 1)], view.sort, columns)
    at = place - first
    found[at] = f"{_MARKED}{_cut(found[at], columns)}{_PLAIN}"
    return [
        _cut(head, columns),
        *(_cut(each, columns) if n != at else each for n, each in enumerate(found)),
    ]


def _detail(view: View, facts: Json | str | None, columns: int, room: int) -> list[str]:
    known = list(_facts(view, facts))
    # Stop scrolling when the last line is visible.
    view.scrolled = min(view.scrolled, max(len(known) - max(room, 1), 0))
    return [_cut(line, columns) for line in known[view.scrolled :]]


def _facts(view: View, facts: Json | str | None) -> Iterator[str]:
    name, version = view.detail or ("", "")
    rows = [row for row in view.rows if (row.name, row.version) == view.detail]
    if rows:
        yield from table(rows, view.sort, None)
    else:
        yield printable(f"{name} version {version} is no longer loaded")
    yield ""
    if facts is None:
        yield "..."
    elif isinstance(facts, str):
        yield printable(facts)
    else:
        yield from model_lines(facts)


def _width(columns: Sequence[_Column]) -> int:
    return sum(each.width + 1 for each in columns)


def _sized(text: str, width: int) -> str:
    return set_cell_size(
        text if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…", width
    )


def _cut(text: str, columns: int) -> str:
    return text if cell_len(text) <= columns else _sized(text, columns)
