"""The states of an HTTP/1.1 connection as a table, and its theory of operation.

A connection carries one request after the other, and answers them in their order (RFC 9112, 9.3).
One is looked at when the one before it has been answered, and not sooner: so what is behind a
request, be it malformed, cannot change its answer, and what is after the last one is dropped.

There are two ways to an answer, and one reader. The fast path answers requests whose header block
is known, see `plans.py`, without a parser and a task; every other one goes the general path: llhttp
reads its header block, its body is framed by what that says, and a task answers it. On both, the
bytes of a request are told from those behind it before it is answered, and the latter are kept:
there is no request that takes the connection with it.

The ordinary life is short. In IDLE the first bytes of a request come. If its header block is known
and the body is there, it is executed: what is answered at once never leaves IDLE, what takes longer
is EXECUTING until ANSWER. If the body is not there, the connection is RECEIVING until it is, or
until `message_timeout_seconds`, when the request goes the general path, and is refused there as any
other. If the header block is not known, the connection is GENERAL until all bytes of the request
have come, and ANSWERING until its answer has left: GENERAL_DONE.

Clients may send ahead. Such bytes are kept, up to a bound at which the connection reads no more,
and in QUEUED the connection waits for its turn of the event loop, so that one client that sends
ahead cannot starve the others. A client that does not read its answers makes the connection
BLOCKED: nothing more is begun for it, so that what waits for it is bounded by one answer.

An answer that is the last one, since the client or the server wants it so, or since it cannot be
told where the next request begins, ends in CLOSING: the transport sends what it has and closes.
CLOSED is the end, and whatever was in flight has been cancelled then.

Two things are not states. Whether the server drains is the same for all connections, and decides
only between ANSWER and LAST_ANSWER. And the amount of bytes that came ahead decides only whether
the connection asks for a turn when it is IDLE again.
"""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import TypeAlias


class State(IntEnum):
    """The state of a connection."""

    IDLE = 0
    """No request is in flight; the next bytes begin one."""
    RECEIVING = 1
    """The fast path has a known header block, and part of its body."""
    EXECUTING = 2
    """The fast path has begun a request and has no answer yet."""
    QUEUED = 3
    """No request is in flight; pipelined ones wait for the next iteration of the event loop."""
    BLOCKED = 4
    """No request is in flight; the client does not read its answers, so none is begun."""
    GENERAL = 5
    """A general-path request is arriving: its header block, or the rest of its body."""
    ANSWERING = 6
    """A general-path request has arrived; pipelined bytes are kept."""
    CLOSING = 7
    """The transport sends the rest and closes; nothing more is read."""
    CLOSED = 8
    """The connection has ended."""


class Input(IntEnum):
    """An event of a connection."""

    PART = 0
    """A known header block came with part of its body."""
    WHOLE = 1
    """The rest of that body came."""
    BEGUN = 2
    """The fast path began a request that will be answered later."""
    ANSWER = 3
    """The fast path has an answer to send, and the connection stays."""
    LAST_ANSWER = 4
    """The fast path has an answer to send, after which the connection closes."""
    AHEAD = 5
    """Pipelined bytes came."""
    TURN = 6
    """The next iteration of the event loop."""
    PAUSE = 7
    """The write buffer is above its high-water mark."""
    RESUME = 8
    """The write buffer is below its low-water mark again."""
    GENERAL_BEGUN = 9
    """A request that comes is one of the general path."""
    GENERAL_WHOLE = 10
    """The last bytes of such a request came."""
    GENERAL_DONE = 11
    """The answer to such a request has left, and the connection stays."""
    CLOSE = 12
    """The server closes the connection."""
    LOST = 13
    """The transport ended."""


Row: TypeAlias = Mapping[Input, State]

_ENDS: Row = {Input.CLOSE: State.CLOSING, Input.LOST: State.CLOSED}

TRANSITIONS: Mapping[State, Row] = MappingProxyType(
    {
        State.IDLE: {
            Input.PART: State.RECEIVING,
            Input.BEGUN: State.EXECUTING,
            Input.ANSWER: State.IDLE,
            Input.LAST_ANSWER: State.CLOSING,
            Input.AHEAD: State.QUEUED,
            Input.PAUSE: State.BLOCKED,
            Input.GENERAL_BEGUN: State.GENERAL,
            **_ENDS,
        },
        State.RECEIVING: {
            Input.WHOLE: State.IDLE,
            Input.GENERAL_BEGUN: State.GENERAL,
            **_ENDS,
        },
        State.EXECUTING: {
            Input.ANSWER: State.IDLE,
            Input.LAST_ANSWER: State.CLOSING,
            Input.AHEAD: State.EXECUTING,
            **_ENDS,
        },
        State.QUEUED: {
            Input.AHEAD: State.QUEUED,
            Input.TURN: State.IDLE,
            **_ENDS,
        },
        State.BLOCKED: {
            Input.AHEAD: State.BLOCKED,
            Input.RESUME: State.IDLE,
            **_ENDS,
        },
        State.GENERAL: {
            Input.PAUSE: State.GENERAL,
            Input.RESUME: State.GENERAL,
            Input.GENERAL_WHOLE: State.ANSWERING,
            **_ENDS,
        },
        State.ANSWERING: {
            Input.PAUSE: State.ANSWERING,
            Input.RESUME: State.ANSWERING,
            Input.AHEAD: State.ANSWERING,
            Input.GENERAL_DONE: State.IDLE,
            **_ENDS,
        },
        State.CLOSING: {
            Input.PAUSE: State.CLOSING,
            Input.RESUME: State.CLOSING,
            **_ENDS,
        },
        State.CLOSED: {},
    }
)
"""State -> input -> next state; an input not in it is our own mistake, and raises IllegalInput."""


class IllegalInput(RuntimeError):
    """An input that the table forbids in the state of the connection: a mistake of our own."""

    def __init__(self, state: State, happening: Input) -> None:
        super().__init__(f"{happening.name} happened to an HTTP connection that is {state.name}")


class Column(dict[State, State]):
    """Next state of each one upon an input; a lookup raises IllegalInput for others."""

    __slots__ = ("happening",)

    def __init__(self, happening: Input) -> None:
        super().__init__(
            {state: row[happening] for state, row in TRANSITIONS.items() if happening in row}
        )
        self.happening = happening

    # A lookup that succeeds runs no Python at all.
    def __missing__(self, state: State) -> State:
        raise IllegalInput(state, self.happening)


COLUMNS: tuple[Column, ...] = tuple(map(Column, Input))
"""The table as `COLUMNS[input][state]`."""


class Lifecycle:
    """Holds the state of one connection; only the table sets it.

    That is `change`, or `self.state = COLUMNS[input][self.state]` where every request passes.
    """

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = State.IDLE

    def change(self, happening: Input) -> None:
        """Change the state by the table; raises IllegalInput without a row."""
        self.state = COLUMNS[happening][self.state]
