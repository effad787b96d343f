"""Draw each state machine from its table into a page of docs/ (or `--check`)."""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from xlaserve.grpc.http2 import states as http2
from xlaserve.http.connection import states as http
from xlaserve.residence import lifecycle

DOCS = Path(__file__).resolve().parent.parent / "docs"


@dataclass(frozen=True)
class Drawing:
    """One page."""

    page: str
    source: str
    """The file that has the table."""
    introduction: str
    start: str
    rows: Iterable[tuple[str, str, str]]
    """Before, after, and the names of what leads from one to the other."""
    below: str = ""
    """The text below the drawing."""

    def text(self) -> str:
        """Return the whole page."""
        title, _, rest = self.introduction.partition("\n")
        arrows = [f"    [*] --> {self.start}"]
        arrows += [f"    {before} --> {after}: {label}" for before, after, label in self.rows]
        return (
            f"# {title}\n\nMade by `tools/draw_lifecycle.py` from the table in\n`{self.source}`. "
            f"What is not drawn is forbidden. {rest}\n\n"
            "```mermaid\nstateDiagram-v2\n" + "\n".join(arrows) + "\n```\n" + self.below
        )


def _http_rows() -> Iterable[tuple[str, str, str]]:
    """One arrow for each pair of states; the two ends, which all states have, are left out."""
    for before, row in http.TRANSITIONS.items():
        arrows: dict[http.State, list[str]] = {}
        for happening, after in row.items():
            if happening not in (http.Input.LOST, http.Input.CLOSE):
                arrows.setdefault(after, []).append(happening.name)
        for after, names in arrows.items():
            yield before.name, after.name, ", ".join(names)
    yield http.State.CLOSING.name, http.State.CLOSED.name, http.Input.LOST.name


def _stream_rows() -> Iterable[tuple[str, str, str]]:
    """One arrow for each pair of states."""
    for before, row in http2.TRANSITIONS.items():
        arrows: dict[http2.State, list[str]] = {}
        for happening, after in row.items():
            if isinstance(after, http2.State):
                arrows.setdefault(after, []).append(happening.name)
        for after, names in arrows.items():
            yield before.name, after.name, ", ".join(names)


def _stream_reactions() -> str:
    """Return the table of what is no step to a state."""
    columns = [happening for happening in http2.Input if happening is not http2.Input.SEND_END]
    lines = [
        "| in state | " + " | ".join(happening.name for happening in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for state, row in http2.TRANSITIONS.items():
        found = [row.get(happening) for happening in columns]
        names = [
            reaction.name if isinstance(reaction, http2.Reaction) else "" for reaction in found
        ]
        if any(names):
            lines.append(f"| {state.name} | " + " | ".join(names) + " |")
    return "\nWhat is no step:\n\n" + "\n".join(lines) + "\n"


DRAWINGS = (
    Drawing(
        "lifecycle.md",
        "server/xlaserve/residence/lifecycle.py",
        "The lifecycle of a model version\nRequests are\n"
        "answered in READY and RELOADING; the repository index shows RELOADING as READY.",
        lifecycle.State.UNAVAILABLE,
        [(before, after, event) for (before, event), after in lifecycle.TRANSITIONS.items()],
    ),
    Drawing(
        "http-connection.md",
        "server/xlaserve/http/connection/states.py",
        "The states of an HTTP/1.1 connection\nFrom every\n"
        "state CLOSE leads to CLOSING, and LOST to CLOSED. Its docstring explains them all.",
        http.State.IDLE.name,
        list(_http_rows()),
    ),
    Drawing(
        "http2-streams.md",
        "server/xlaserve/grpc/http2/states.py",
        "The states of an HTTP/2 stream\nIts rules are\n"
        "those of RFC 9113 5.1. Frames that come have the names of their types, with `_END` where\n"
        "they end the request; what the server does begins with `SEND_`. HALF_CLOSED_LOCAL lasts\n"
        "for no frame: a request that is answered before its end is reset at once (8.1). A stream\n"
        "in RESET is closed, too, but by the server: what is still on its way is ignored.",
        http2.State.IDLE.name,
        list(_stream_rows()),
        _stream_reactions(),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if not fresh")
    is_check, status = parser.parse_args().check, 0
    for drawing in DRAWINGS:
        path = DOCS / drawing.page
        if not is_check:
            path.write_text(drawing.text())
            continue
        fresh = path.exists() and path.read_text() == drawing.text()
        status |= not fresh
        print(
            f"docs/{drawing.page} is {'fresh' if fresh else 'stale: run tools/draw_lifecycle.py'}"
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
