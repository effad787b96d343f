"""The state table of an HTTP/1.1 connection, and its theory of operation.

A connection handles one request at a time, and answers in order (RFC 9112, 9.3). A request is
parsed only after the previous one has been answered. Therefore the bytes after a request, even
malformed ones, cannot change its response, and the bytes after the last request are discarded.

There are two paths to a response, but one reader. The fast path answers requests whose header block
is known (see `plans.py`) without a parser or a task. All other requests take the general path:
llhttp parses the header block, which determines the framing of the body, and a task answers the
request. On both paths, the connection separates the bytes of a request from pipelined bytes before
it answers, and keeps the latter: no request takes over the connection.

The common case is short. In IDLE the first bytes of a request arrive. If the header block is known
and the body is complete, the request is executed: an immediate response never leaves IDLE, a later
one is EXECUTING until ANSWER. If the body is incomplete, the connection is RECEIVING until the rest
arrives, or until `message_timeout_seconds` expires; then the request takes the general path, which
refuses it like any other. If the header block is unknown, the connection is GENERAL until the whole
request has arrived, and ANSWERING until its response has been sent (GENERAL_DONE).

Clients may pipeline. Pipelined bytes are kept up to a limit at which the connection stops reading.
In QUEUED the connection waits for the next iteration of the event loop, so that one pipelining
client cannot starve the others. A client that does not read its responses makes the connection
BLOCKED: no further request is started, so at most one response is buffered for it.

A response is the last one if the client or the server asks for that, or if the start of the next
request is unknown. It leads to CLOSING: the transport sends its buffer and closes. CLOSED is final;
any request in flight has been cancelled.

Two facts are not states. Whether the server drains is the same for all connections, and only
decides between ANSWER and LAST_ANSWER. The number of pipelined bytes only decides whether the
connection goes from IDLE to QUEUED.
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
    """The fast path knows the header block, and part of the body has arrived."""
    EXECUTING = 2
    """The fast path has started a request and waits for its response."""
    QUEUED = 3
    """No request is in flight; pipelined ones wait for the next iteration of the event loop."""
    BLOCKED = 4
    """No request is in flight, and none is started while the client does not read responses."""
    GENERAL = 5
    """A general-path request is arriving: its header block, or the rest of its body."""
    ANSWERING = 6
    """A general-path request has arrived; pipelined bytes are kept."""
    CLOSING = 7
    """The transport sends its buffer and closes; nothing more is read."""
    CLOSED = 8
    """The connection has ended."""


class Input(IntEnum):
    """An event of a connection."""

    PART = 0
    """A known header block arrived with part of its body."""
    WHOLE = 1
    """The rest of that body arrived."""
    BEGUN = 2
    """The fast path started a request that will be answered later."""
    ANSWER = 3
    """The fast path has a response to send and keeps the connection open."""
    LAST_ANSWER = 4
    """The fast path has a response to send, after which the connection closes."""
    AHEAD = 5
    """Pipelined bytes arrived."""
    TURN = 6
    """The next iteration of the event loop began."""
    PAUSE = 7
    """The write buffer is above its high-water mark."""
    RESUME = 8
    """The write buffer is below its low-water mark again."""
    GENERAL_BEGUN = 9
    """A general-path request began to arrive."""
    GENERAL_WHOLE = 10
    """The last bytes of a general-path request arrived."""
    GENERAL_DONE = 11
    """The response to a general-path request was sent, and the connection stays open."""
    CLOSE = 12
    """The server closes the connection."""
    LOST = 13
    """The transport was closed."""


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
"""Next state by state and input; an input without an entry is a bug and raises IllegalInput."""


class IllegalInput(RuntimeError):
    """The table has no entry for the input in this state: a bug in the server."""

    def __init__(self, state: State, happening: Input) -> None:
        super().__init__(f"{happening.name} happened to an HTTP connection that is {state.name}")


class Column(dict[State, State]):
    """Next state by current state, for one input; missing states raise IllegalInput."""

    __slots__ = ("happening",)

    def __init__(self, happening: Input) -> None:
        super().__init__(
            {state: row[happening] for state, row in TRANSITIONS.items() if happening in row}
        )
        self.happening = happening

    # A successful lookup runs no Python code.
    def __missing__(self, state: State) -> State:
        raise IllegalInput(state, self.happening)


COLUMNS: tuple[Column, ...] = tuple(map(Column, Input))
"""The table as `COLUMNS[input][state]`."""


class Lifecycle:
    """Holds the state of one connection, which only the table may change.

    Use `change`, or `self.state = COLUMNS[input][self.state]` in the hot path.
    """

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = State.IDLE

    def change(self, happening: Input) -> None:
        """Change the state by the table; raises IllegalInput if the table has no entry."""
        self.state = COLUMNS[happening][self.state]
