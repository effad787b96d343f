"""State machines drawn from their tables: sections of docs/architecture.md."""

from collections.abc import Iterable
from dataclasses import dataclass

from xlaserve.grpc.http2 import states as http2
from xlaserve.http.connection import states as http
from xlaserve.residence import lifecycle


@dataclass(frozen=True)
class Drawing:
    """One section."""

    title: str
    source: str
    """The file that contains the table."""
    introduction: str
    start: str
    rows: Iterable[tuple[str, str, str]]
    """State before, state after, and the names of the inputs that lead there."""
    below: str = ""
    """The text below the drawing."""

    def text(self) -> str:
        """Return the whole section."""
        arrows = [f"    [*] --> {self.start}"]
        arrows += [f"    {before} --> {after}: {label}" for before, after, label in self.rows]
        return (
            f"### {self.title}\n\nThe drawing shows the table in `{self.source}`. All other\n"
            f"transitions are forbidden. {self.introduction}\n\n"
            "```mermaid\nstateDiagram-v2\n" + "\n".join(arrows) + "\n```\n" + self.below
        )


def _http_rows() -> Iterable[tuple[str, str, str]]:
    """Yield one arrow per pair of states; LOST and CLOSE, possible in every state, are left out."""
    for before, row in http.TRANSITIONS.items():
        arrows: dict[http.State, list[str]] = {}
        for happening, after in row.items():
            if happening not in (http.Input.LOST, http.Input.CLOSE):
                arrows.setdefault(after, []).append(happening.name)
        for after, names in arrows.items():
            yield before.name, after.name, ", ".join(names)
    yield http.State.CLOSING.name, http.State.CLOSED.name, http.Input.LOST.name


def _stream_rows() -> Iterable[tuple[str, str, str]]:
    """Yield one arrow per pair of states."""
    for before, row in http2.TRANSITIONS.items():
        arrows: dict[http2.State, list[str]] = {}
        for happening, after in row.items():
            if isinstance(after, http2.State):
                arrows.setdefault(after, []).append(happening.name)
        for after, names in arrows.items():
            yield before.name, after.name, ", ".join(names)


def _stream_reactions() -> str:
    """Return the table of inputs that do not change the state."""
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
    return "\nReactions without a transition:\n\n" + "\n".join(lines) + "\n"


DRAWINGS = (
    Drawing(
        "The lifecycle of a model version",
        "server/xlaserve/residence/lifecycle.py",
        "The server answers\n"
        "requests in READY and RELOADING. The repository index shows RELOADING as READY.",
        lifecycle.State.UNAVAILABLE,
        [(before, after, event) for (before, event), after in lifecycle.TRANSITIONS.items()],
    ),
    Drawing(
        "The states of an HTTP/1.1 connection",
        "server/xlaserve/http/connection/states.py",
        "From every state,\n"
        "CLOSE leads to CLOSING and LOST to CLOSED. The module's docstring explains the states.",
        http.State.IDLE.name,
        list(_http_rows()),
    ),
    Drawing(
        "The states of an HTTP/2 stream",
        "server/xlaserve/grpc/http2/states.py",
        "RFC 9113, section\n"
        "5.1, has the rules.\n\n"
        "- An input has the name of the received frame, with `_END` if it has END_STREAM.\n"
        "- Actions of the server start with `SEND_`.\n"
        "- If the answer is complete before the request, the server resets the stream\n"
        "  immediately (8.1). So it reads no frame in HALF_CLOSED_LOCAL.\n"
        "- The server has closed a stream in RESET. It ignores frames that were in transit.",
        http2.State.IDLE.name,
        list(_stream_rows()),
        _stream_reactions(),
    ),
)
