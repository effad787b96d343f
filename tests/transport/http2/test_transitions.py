"""Every input in every stream state follows the table (RFC 9113 5.1), on a real engine.

`test_states.py` checks the table itself. Here an engine is brought into each state and then
given every input: as frames, or by an action of the server.
"""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import pytest
from support.frames import Frame, Kind, data, headers, literals, rst_stream, window_update
from support.memory_client import REQUEST, STATUS, MemoryClient, Streaming, told

from xlaserve.grpc import http2
from xlaserve.grpc.http2.states import (
    REACTION_CODES,
    STREAM_ERRORS,
    TRANSITIONS,
    Input,
    Reaction,
    State,
)
from xlaserve.grpc.http2.streams import ANSWERED_SECONDS

TRAILERS = literals([("x-end", "1")])


def _send(make: Callable[[bool], Frame]) -> Callable[[MemoryClient], None]:
    def send(client: MemoryClient) -> None:
        client.send(make(1 in client.route.streams))

    return send


def _block(opened: bool) -> bytes:
    return TRAILERS if opened else REQUEST


def _end(client: MemoryClient) -> None:
    if 1 in client.route.streams:
        client.route.streams[1].send_headers(STATUS, end=True)


def _reset(client: MemoryClient) -> None:
    if 1 in client.route.streams:
        client.route.streams[1].reset()


HAPPENINGS: Mapping[Input, Callable[[MemoryClient], None]] = {
    Input.HEADERS: _send(lambda opened: headers(1, _block(opened))),
    Input.HEADERS_END: _send(lambda opened: headers(1, _block(opened), end_stream=True)),
    Input.DATA: _send(lambda opened: data(1, b"a")),
    Input.DATA_END: _send(lambda opened: data(1, b"a", end_stream=True)),
    Input.WINDOW_UPDATE: _send(lambda opened: window_update(1, 1)),
    Input.RST_STREAM: _send(lambda opened: rst_stream(1)),
    Input.SEND_END: _end,
    Input.SEND_RST: _reset,
    Input.CONNECTION_END: lambda client: client.core.lost(),
}
"""How each input is applied to stream 1."""

BY_US = {Input.SEND_END, Input.SEND_RST, Input.CONNECTION_END}

REACHED: Mapping[State, Sequence[Sequence[Input]]] = {
    State.IDLE: [()],
    State.OPEN: [
        (Input.HEADERS,),
        (Input.HEADERS, Input.DATA),
        (Input.HEADERS, Input.WINDOW_UPDATE),
    ],
    State.HALF_CLOSED_REMOTE: [
        (Input.HEADERS_END,),
        (Input.HEADERS, Input.DATA_END),
        (Input.HEADERS, Input.HEADERS_END),
    ],
    State.CLOSED: [
        (Input.HEADERS, Input.RST_STREAM),
        (Input.HEADERS_END, Input.RST_STREAM),
        (Input.HEADERS_END, Input.SEND_END),
        (Input.HEADERS, Input.SEND_END, Input.DATA_END),
        (Input.HEADERS, Input.SEND_END, Input.HEADERS_END),
        (Input.HEADERS, Input.SEND_END, Input.RST_STREAM),
    ],
    State.HALF_CLOSED_LOCAL: [
        (Input.HEADERS, Input.SEND_END),
        (Input.HEADERS, Input.DATA, Input.SEND_END),
        (Input.HEADERS, Input.SEND_END, Input.DATA),
        (Input.HEADERS, Input.SEND_END, Input.WINDOW_UPDATE),
    ],
    State.RESET: [
        (Input.HEADERS, Input.SEND_RST),
        (Input.HEADERS_END, Input.SEND_RST),
        (Input.HEADERS, Input.SEND_END, Input.SEND_RST),
        (Input.HEADERS, Input.SEND_END, Input.HEADERS),  # malformed
        (Input.HEADERS, Input.HEADERS),  # malformed
        (Input.HEADERS_END, Input.DATA),
    ],
}
"""Sequences of inputs that lead to each state."""


class Said:
    """The reactions of an engine to a sequence of inputs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.client = MemoryClient(Streaming(), now=lambda: self.now)

    def happens(self, happening: Input) -> str:
        """Apply an input; return the resulting stream state, or what was ended because of it."""
        before = len(self.client.all)
        HAPPENINGS[happening](self.client)
        if happening is Input.SEND_RST:
            # Only the passage of time resets an answered stream.
            self.now += ANSWERED_SECONDS
            self.client.core.sweep(1000, 1000)
        self.client.taken()
        sent = self.client.all[before:]
        streams = self.client.core._streams
        stream = streams.open.get(1)
        if any(frame.kind in (Kind.RST_STREAM, Kind.GOAWAY) for frame in sent):
            assert stream is None
            return told(sent)[-1]
        if stream is not None:
            return stream.state.name
        is_answered = streams.state_of(1) is State.HALF_CLOSED_LOCAL
        return State.HALF_CLOSED_LOCAL.name if is_answered else "gone"


class Expected:
    """The reactions that the table predicts."""

    def __init__(self) -> None:
        self.state = State.IDLE
        self.ended = False

    def happens(self, happening: Input) -> str:
        """Take the step in the table, and those that follow immediately from it."""
        self.ended = happening is Input.CONNECTION_END
        following = TRANSITIONS[self.state].get(happening, Reaction.FAULT)
        if isinstance(following, State):
            return self._goes_to(following, happening)
        if following is Reaction.FAULT:
            assert happening in BY_US  # and the server does not do so
            return self.state.name if self.state is State.HALF_CLOSED_LOCAL else "gone"
        return self._reacts(following)

    def _goes_to(self, state: State, happening: Input) -> str:
        self.state = state
        if happening is Input.SEND_RST:
            return "RST_STREAM 1 NO_ERROR"
        return "gone" if state is State.CLOSED else state.name

    def _reacts(self, reaction: Reaction) -> str:
        if reaction is Reaction.IGNORE:
            return "gone"
        code = REACTION_CODES[reaction].name
        if reaction in STREAM_ERRORS:
            self.state = State.RESET
            return f"RST_STREAM 1 {code}"
        self.ended = True
        return f"GOAWAY {code}"


PAIRS = [(state, way, last) for state, ways in REACHED.items() for way in ways for last in Input]


@pytest.mark.parametrize(
    ("state", "way", "last"),
    PAIRS,
    ids=["-".join((s.name, *(i.name for i in w), last.name)) for s, w, last in PAIRS],
)
def test_pair(state: State, way: Sequence[Input], last: Input) -> None:
    said, expected = Said(), Expected()
    for happening in way:
        assert expected.happens(happening) == said.happens(happening)
    assert state is expected.state

    assert expected.happens(last) == said.happens(last)


def test_every_state_is_reached() -> None:
    assert set(State) == set(REACHED)


def check(sequence: Sequence[Input]) -> None:
    said, expected = Said(), Expected()
    for happening in sequence:
        assert expected.happens(happening) == said.happens(happening), sequence
        if expected.ended:
            break


def test_every_sequence_of_three() -> None:
    """From idle: 729 sequences, each up to the end of its connection."""
    for sequence in product(Input, repeat=3):
        check(sequence)


@pytest.mark.large
def test_every_sequence_of_five() -> None:
    for sequence in product(Input, repeat=5):
        check(sequence)


# # --- assignments of states --------------------------------------------------------------------

FOLDER = Path(http2.__path__[0])


def assignments_of_states(source: str) -> list[str]:
    """Return the functions that assign an attribute `state`, or set it by name."""
    found = []
    for scope in ast.walk(ast.parse(source)):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(scope):
            stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
            if stored and node.attr == "state":  # type: ignore[attr-defined]
                found.append(scope.name)
            if isinstance(node, ast.Call) and re.search(r"setattr.*'state'", ast.unparse(node)):
                found.append(f"{scope.name} by setattr")
    return found


def test_only_a_stream_itself_sets_its_state_and_from_the_table() -> None:
    found = {
        path.name: names
        for folder in (FOLDER, FOLDER.parent / "grpc")
        for path in folder.glob("*.py")
        if (names := assignments_of_states(path.read_text()))
    }

    assert {"stream.py": ["__init__", "advance"]} == found


def test_what_a_stream_sets_is_of_the_table() -> None:
    source = (FOLDER / "stream.py").read_text()
    values = {
        ast.unparse(node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.state"
    }

    assert {"OPENED[happening]", "following"} == values
    assert "following = NEXT[self.state][happening]" in source


def test_an_assignment_elsewhere_is_found() -> None:
    """Otherwise the test above could not fail."""
    source = "def f(a):\n    a.stream.state = 1\ndef g(a):\n    setattr(a, 'state', 1)\n"

    assert ["f", "g by setattr"] == assignments_of_states(source)
