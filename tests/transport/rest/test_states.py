"""The state table of HTTP connections, over all pairs, and on real connections."""

import ast
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.http import chunked, message

from xlaserve.http.connection import fast_path, states
from xlaserve.http.connection.connection import Connection, Server
from xlaserve.http.connection.fast_path import FastPath
from xlaserve.http.connection.heads import Heads
from xlaserve.http.connection.plans import Plan
from xlaserve.http.connection.request import Request
from xlaserve.http.connection.sending import send
from xlaserve.http.connection.states import (
    COLUMNS,
    TRANSITIONS,
    Column,
    IllegalInput,
    Input,
    Lifecycle,
    State,
)
from xlaserve.http.messages import Answered, HttpResponse, json_response
from xlaserve.net.ledger import Ledger
from xlaserve.serving.call import Headers, Peer

PAIRS = list(product(State, Input))
ROWS = {
    (before, happening, after)
    for before, row in TRANSITIONS.items()
    for happening, after in row.items()
}


@pytest.mark.parametrize(("state", "happening"), PAIRS, ids=lambda value: value.name)
def test_every_pair_is_a_row_of_the_table_or_forbidden(state: State, happening: Input) -> None:
    lifecycle = Lifecycle()
    lifecycle.state = state
    after = TRANSITIONS[state].get(happening)
    assert after is COLUMNS[happening].get(state)
    if after is not None:
        lifecycle.change(happening)
        assert after is lifecycle.state
        return
    with pytest.raises(IllegalInput, match=rf"{happening.name} happened to .* {state.name}$"):
        lifecycle.change(happening)
    assert state is lifecycle.state


def test_nothing_leaves_the_end_and_everything_can_reach_it() -> None:
    assert {} == TRANSITIONS[State.CLOSED]
    for state in set(State) - {State.CLOSED}:
        assert State.CLOSED is TRANSITIONS[state][Input.LOST]
        assert State.CLOSING is TRANSITIONS[state][Input.CLOSE]


def test_a_connection_that_closes_takes_nothing_up_again() -> None:
    """RFC 9112, 9.6: the answer that says `close` is the last one."""
    assert {State.CLOSING, State.CLOSED} == set(TRANSITIONS[State.CLOSING].values())


def test_a_request_goes_one_way_from_its_beginning_to_its_end() -> None:
    """The general path starts with no request, or with one that has not been executed."""
    to_general = {before for before, happening, _ in ROWS if happening is Input.GENERAL_BEGUN}
    from_general = {
        (before, happening)
        for before, happening, after in ROWS
        if before in GENERAL and after not in {*GENERAL, State.CLOSING, State.CLOSED}
    }

    assert {State.IDLE, State.RECEIVING} == to_general
    assert {(State.ANSWERING, Input.GENERAL_DONE)} == from_general


GENERAL = {State.GENERAL, State.ANSWERING}


# # --- on a real connection ----------------------------------------------------------------------


class Wire(asyncio.Transport):
    """A transport that records the output, and whose buffer can be full."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False
        self.protocol: Connection | None = None
        self.fills = False
        """Whether the next write fills the buffer."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data
        if self.fills and self.protocol is not None:
            self.fills = False
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


def post(what: str) -> bytes:
    return message("POST", f"/{what}", body=b"abc")


class Bench:
    """A connection without a socket, whose fast path knows /now and /later."""

    def __init__(self) -> None:
        heads = Heads(100, 1 << 20)
        for what, begin in (("now", self.at_once), ("later", self.begin)):
            heads.plans.keep(post(what)[:-3], Plan("POST", f"/{what}", 3, begin))
        self.server = Server(
            self.respond,
            listener="http_endpoint",
            max_connections=10,
            max_header_bytes=1 << 14,
            idle_seconds=30.0,
            heads=heads,
            body_seconds=30.0,
            ledger=Ledger(1 << 30),
        )
        self.wire = Wire()
        self.done: Answered | None = None
        self.gate = asyncio.Event()
        self.errors: list[Any] = []
        """Exceptions raised by callbacks, which the event loop only logs."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: self.errors.append(context))
        self.connection = Connection(self.server)
        self.connection.connection_made(self.wire)
        self.wire.protocol = self.connection
        fast = self.connection._fast
        assert fast is not None
        self.fast: FastPath = fast

    def at_once(
        self, body: memoryview, done: Answered, headers: Headers, peer: Peer, opened: int
    ) -> HttpResponse:
        return HttpResponse(parts=[bytes(body)])

    def begin(
        self, body: memoryview, done: Answered, headers: Headers, peer: Peer, opened: int
    ) -> "Bench":
        self.done = done
        return self

    def cancel(self) -> None:
        self.done = None

    async def respond(self, request: Request) -> None:
        await self.gate.wait()
        await send(request, json_response("general"))

    # --- steps ---

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def answer(self) -> None:
        assert self.done is not None
        self.done(HttpResponse(parts=[b"{}"]))

    def fail(self) -> None:
        assert self.done is not None
        self.done(asyncio.CancelledError())

    def fill_next(self) -> None:
        self.wire.fills = True

    def fill(self) -> None:
        self.fill_next()
        self.send(post("now"))

    def empty(self) -> None:
        self.connection.resume_writing()

    def full(self) -> None:
        self.connection.pause_writing()

    def drain(self) -> None:
        self.server.is_draining = True

    def lose(self) -> None:
        self.connection.connection_lost(None)


Step = Callable[[Bench], Awaitable[None] | None]


def sends(data: bytes) -> Step:
    return lambda bench: bench.send(data)


async def settled(bench: Bench) -> None:
    await bench.settle()


async def opened(bench: Bench) -> None:
    """Have the handler answer."""
    bench.gate.set()
    await bench.settle()


KNOWN, LATER, UNKNOWN = post("now"), post("later"), post("unknown")
LAST = message("POST", "/last", ("Connection", "close"), body=b"abc")
CHUNKED = message("POST", "/u", ("Transfer-Encoding", "chunked"), length=None) + chunked(b"abc")

CONVERSATIONS: dict[str, Sequence[tuple[Step, State]]] = {
    "answered at once": [(sends(KNOWN), State.IDLE)],
    "answered at once, and the last": [(Bench.drain, State.IDLE), (sends(KNOWN), State.CLOSING)],
    "answered later": [(sends(LATER), State.EXECUTING), (Bench.answer, State.IDLE)],
    "answered later, and the last": [
        (sends(LATER), State.EXECUTING),
        (Bench.drain, State.EXECUTING),
        (Bench.answer, State.CLOSING),
        (sends(KNOWN), State.CLOSING),
    ],
    "a body in two parts": [(sends(KNOWN[:-1]), State.RECEIVING), (sends(b"c"), State.IDLE)],
    "a body of which more is missing": [
        (sends(LATER[:-2]), State.RECEIVING),
        (sends(b"b"), State.RECEIVING),
        (sends(b"c"), State.EXECUTING),
    ],
    "a body that does not come": [
        (sends(KNOWN[:-1]), State.RECEIVING),
        (lambda bench: bench.connection.drain(), State.GENERAL),
        (settled, State.GENERAL),
        (sends(b"c"), State.ANSWERING),
    ],
    "sent ahead": [
        (sends(LATER), State.EXECUTING),
        (sends(KNOWN), State.EXECUTING),
        (Bench.answer, State.QUEUED),
        (sends(KNOWN), State.QUEUED),
        (settled, State.IDLE),
    ],
    "sent ahead at once": [(sends(KNOWN * 3), State.QUEUED), (settled, State.IDLE)],
    "one of those sent ahead takes longer": [
        (sends(KNOWN + LATER + KNOWN), State.QUEUED),
        (settled, State.EXECUTING),
        (Bench.answer, State.QUEUED),
        (settled, State.IDLE),
    ],
    "sent ahead, in part": [(sends(KNOWN + KNOWN[:-1]), State.QUEUED), (settled, State.RECEIVING)],
    "sent ahead, and unknown": [(sends(KNOWN + UNKNOWN), State.QUEUED), (settled, State.ANSWERING)],
    "a client that does not read": [
        (Bench.fill, State.BLOCKED),
        (sends(KNOWN), State.BLOCKED),
        (Bench.empty, State.QUEUED),
        (settled, State.IDLE),
    ],
    "a client that reads again": [(Bench.fill, State.BLOCKED), (Bench.empty, State.IDLE)],
    "the last answer is not read": [
        (Bench.drain, State.IDLE),
        (Bench.fill, State.CLOSING),
        (Bench.empty, State.CLOSING),
    ],
    "the general path": [
        (sends(UNKNOWN[:-1]), State.GENERAL),
        (settled, State.GENERAL),
        (sends(b"c"), State.ANSWERING),
        (opened, State.IDLE),
        (sends(KNOWN), State.IDLE),
    ],
    "a head in two parts": [
        (sends(UNKNOWN[:10]), State.GENERAL),
        (sends(UNKNOWN[10:]), State.ANSWERING),
        (opened, State.IDLE),
    ],
    "a known head in two parts": [
        (sends(KNOWN[:10]), State.GENERAL),
        (sends(KNOWN[10:]), State.ANSWERING),
        (opened, State.IDLE),
    ],
    "in chunks": [
        (sends(CHUNKED[:-1]), State.GENERAL),
        (settled, State.GENERAL),
        (sends(CHUNKED[-1:] + KNOWN), State.ANSWERING),
        (opened, State.IDLE),
        (sends(KNOWN), State.IDLE),
    ],
    "in chunks that are none": [
        (sends(CHUNKED[:-9] + b"?"), State.GENERAL),
        (sends(KNOWN), State.GENERAL),
        (opened, State.CLOSING),
    ],
    "answered before its body has come": [
        (sends(UNKNOWN[:-1]), State.GENERAL),
        (opened, State.GENERAL),
        (sends(b"c" + KNOWN), State.ANSWERING),
        (settled, State.IDLE),
    ],
    "sent ahead while a request is answered": [
        (sends(UNKNOWN), State.ANSWERING),
        (sends(KNOWN), State.ANSWERING),
        (opened, State.IDLE),
    ],
    "sent ahead in part while a request is answered": [
        (sends(UNKNOWN), State.ANSWERING),
        (sends(KNOWN[:-1]), State.ANSWERING),
        (opened, State.RECEIVING),
        (sends(b"c"), State.IDLE),
    ],
    "two at once": [(sends(UNKNOWN * 2), State.ANSWERING), (opened, State.IDLE)],
    "the last one": [
        (sends(LAST + KNOWN), State.ANSWERING),
        (opened, State.CLOSING),
        (sends(KNOWN), State.CLOSING),
    ],
    "malformed": [(sends(b"?"), State.CLOSING), (sends(KNOWN), State.CLOSING)],
    "malformed behind others": [
        (sends(KNOWN + UNKNOWN + b"?"), State.QUEUED),
        (settled, State.ANSWERING),
        (opened, State.CLOSING),
    ],
    "an answer that is not read": [
        (sends(UNKNOWN[:-1]), State.GENERAL),
        (settled, State.GENERAL),
        (Bench.full, State.GENERAL),
        (Bench.empty, State.GENERAL),
        (sends(b"c"), State.ANSWERING),
        (Bench.full, State.ANSWERING),
        (Bench.empty, State.ANSWERING),
        (sends(KNOWN), State.ANSWERING),
        (Bench.fill_next, State.ANSWERING),
        # The answer has been written; the next request starts once the client has read it.
        (opened, State.ANSWERING),
        (Bench.empty, State.ANSWERING),
        (settled, State.IDLE),
    ],
    "the last answer is not read, of the general path": [
        (sends(LAST), State.ANSWERING),
        (Bench.fill_next, State.ANSWERING),
        (opened, State.ANSWERING),
        (Bench.empty, State.ANSWERING),
        (settled, State.CLOSING),
    ],
    "cancelled": [(sends(LATER), State.EXECUTING), (Bench.fail, State.CLOSING)],
}

TO: dict[State, Sequence[tuple[Step, State]]] = {
    State.IDLE: [],
    State.RECEIVING: [(sends(KNOWN[:-1]), State.RECEIVING)],
    State.EXECUTING: [(sends(LATER), State.EXECUTING)],
    State.QUEUED: [(sends(KNOWN * 2), State.QUEUED)],
    State.BLOCKED: [(Bench.fill, State.BLOCKED)],
    State.GENERAL: [(sends(UNKNOWN[:10]), State.GENERAL)],
    State.ANSWERING: [(sends(UNKNOWN), State.ANSWERING)],
    State.CLOSING: [(Bench.drain, State.IDLE), (sends(KNOWN), State.CLOSING)],
}
"""Steps that lead to each state except the last."""


async def follow(bench: Bench, steps: Sequence[tuple[Step, State]]) -> None:
    for step, state in steps:
        done = step(bench)
        if done is not None:
            await done
        assert state is bench.fast.state


async def end(bench: Bench) -> None:
    if bench.fast.state is not State.CLOSED:
        bench.lose()
    await bench.settle()
    assert [] == bench.errors


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_a_conversation_goes_through_the_states(name: str) -> None:
    bench = Bench()
    await follow(bench, CONVERSATIONS[name])
    await end(bench)

    assert State.CLOSED is bench.fast.state


@pytest.mark.parametrize("state", TO, ids=lambda state: state.name)
async def test_a_connection_may_be_lost_or_closed_in_every_state(state: State) -> None:
    """Afterwards nothing runs: no callback, no timer, no answer."""
    lost, closed = Bench(), Bench()
    for bench in (lost, closed):
        await follow(bench, TO[state])
    lost.lose()
    closed.fast.end(Input.CLOSE)
    written = lost.wire.written, closed.wire.written
    for bench in (lost, closed):
        bench.gate.set()
        await bench.settle()

    assert (State.CLOSED, State.CLOSING) == (lost.fast.state, closed.fast.state)
    assert written[0] == lost.wire.written
    assert state in GENERAL or written[1] == closed.wire.written
    await end(closed)


IN_FLIGHT = {State.RECEIVING, State.EXECUTING, State.QUEUED, State.ANSWERING}


@pytest.mark.parametrize("state", TO, ids=lambda state: state.name)
async def test_only_a_connection_without_a_request_is_closed_as_idle(state: State) -> None:
    """An incomplete header block does not count as a request."""
    bench = Bench()
    await follow(bench, TO[state])
    bench.connection.close_idle()
    expected = state if state in IN_FLIGHT else State.CLOSING
    found = bench.fast.state
    await end(bench)

    assert expected is found


async def test_every_row_of_the_table_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that no conversation reaches would be useless."""
    seen = set()

    def note(column: Column, before: State) -> State:
        after = dict.__getitem__(column, before)
        seen.add((before, column.happening, after))
        return after

    monkeypatch.setattr(Column, "__getitem__", note, raising=False)
    for steps in CONVERSATIONS.values():
        bench = Bench()
        await follow(bench, steps)
        await end(bench)
    for steps in TO.values():
        for last in (Input.LOST, Input.CLOSE):
            bench = Bench()
            await follow(bench, steps)
            bench.fast.end(last)
            bench.connection._fast = None
            await bench.settle()

    assert set() == ROWS - seen


def test_only_the_table_sets_a_state() -> None:
    """Every assignment takes its value from the table, by input and by the current state."""
    values = {
        ast.unparse(node.value)
        for path in Path(states.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith(".state")
    }

    assert {
        "State.IDLE",  # of a new connection
        "COLUMNS[happening][self.state]",
        "_BEGUN[self.state]",
        "(_ANSWERED_LAST if is_last else _ANSWERED)[self.state]",
    } == values
    assert fast_path._BEGUN is COLUMNS[Input.BEGUN]
    assert fast_path._ANSWERED is COLUMNS[Input.ANSWER]
    assert fast_path._ANSWERED_LAST is COLUMNS[Input.LAST_ANSWER]


@pytest.mark.parametrize("answered", [KNOWN, UNKNOWN])
async def test_an_answer_restarts_the_idle_time(answered: bytes) -> None:
    """The timer is checked only when it may have expired, so that answers set no timers."""
    bench = Bench()
    bench.gate.set()
    connection = bench.connection
    connection._since = -1e9  # the connection was opened long ago
    bench.send(answered)
    await bench.settle()

    connection._check_timeouts()
    assert not bench.wire.closed
    connection._since = bench.fast.answered_at = -1e9
    connection._check_timeouts()
    assert bench.wire.closed


@pytest.mark.parametrize("state", sorted(set(TO) - {State.IDLE, State.GENERAL, State.CLOSING}))
async def test_a_connection_with_a_request_is_not_idle(state: State) -> None:
    bench = Bench()
    await follow(bench, TO[state])
    bench.connection._since = bench.fast.answered_at = -1e9
    bench.connection._check_timeouts()
    found = bench.fast.state
    await end(bench)

    assert state is found


@pytest.mark.parametrize(
    ("error", "logged"), [(ConnectionResetError("gone"), 0), (ValueError("wrong"), 1)]
)
async def test_a_client_that_leaves_within_its_answer_is_not_logged(
    error: Exception, logged: int
) -> None:
    bench = Bench()

    async def respond(request: Request) -> None:
        raise error

    bench.server.respond = respond
    with capture_logs() as logs:
        bench.send(UNKNOWN)
        await bench.settle()

    assert logged == len(logs)
    assert logged == bench.wire.written.count(b"HTTP/1.1 500")
    assert bench.wire.closed
