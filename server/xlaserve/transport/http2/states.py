"""The states of a stream as a table (RFC 9113, 5.1)."""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import TypeAlias

from xlaserve.transport.http2.frames import ErrorCode


class State(IntEnum):
    """Where a stream is, as its server sees it."""

    IDLE = 0
    OPEN = 1
    HALF_CLOSED_REMOTE = 2
    """The client has sent all; we have not."""
    HALF_CLOSED_LOCAL = 3
    """We have sent all; the client has not."""
    CLOSED = 4
    RESET = 5
    """Closed by a RST_STREAM of ours: what the client sent before it knew is ignored."""


class Input(IntEnum):
    """What happens to a stream."""

    HEADERS = 0
    """HEADERS without END_STREAM came."""
    HEADERS_END = 1
    DATA = 2
    DATA_END = 3
    WINDOW_UPDATE = 4
    RST_STREAM = 5
    SEND_END = 6
    """We send a frame with END_STREAM."""
    SEND_RST = 7


class Reaction(IntEnum):
    """What happens instead of a change of state."""

    IGNORE = -1
    STREAM_CLOSED = -2
    """A stream error."""
    MALFORMED = -3
    """A stream error: the request is not one of HTTP (RFC 9113, 8.1.1)."""
    CONNECTION_STREAM_CLOSED = -4
    """A connection error."""
    CONNECTION_PROTOCOL_ERROR = -5
    """A connection error."""


Row: TypeAlias = Mapping[Input, State | Reaction]

TRANSITIONS: Mapping[State, Row] = MappingProxyType(
    {
        State.IDLE: {
            Input.HEADERS: State.OPEN,
            Input.HEADERS_END: State.HALF_CLOSED_REMOTE,
        },
        State.OPEN: {
            Input.HEADERS: Reaction.MALFORMED,  # trailers end a stream
            Input.HEADERS_END: State.HALF_CLOSED_REMOTE,
            Input.DATA: State.OPEN,
            Input.DATA_END: State.HALF_CLOSED_REMOTE,
            Input.WINDOW_UPDATE: State.OPEN,
            Input.RST_STREAM: State.CLOSED,
            Input.SEND_END: State.HALF_CLOSED_LOCAL,
            Input.SEND_RST: State.RESET,
        },
        State.HALF_CLOSED_REMOTE: {
            Input.HEADERS: Reaction.STREAM_CLOSED,
            Input.HEADERS_END: Reaction.STREAM_CLOSED,
            Input.DATA: Reaction.STREAM_CLOSED,
            Input.DATA_END: Reaction.STREAM_CLOSED,
            Input.WINDOW_UPDATE: State.HALF_CLOSED_REMOTE,
            Input.RST_STREAM: State.CLOSED,
            Input.SEND_END: State.CLOSED,
            Input.SEND_RST: State.RESET,
        },
        State.HALF_CLOSED_LOCAL: {
            Input.HEADERS: Reaction.MALFORMED,
            Input.HEADERS_END: State.CLOSED,
            Input.DATA: State.HALF_CLOSED_LOCAL,
            Input.DATA_END: State.CLOSED,
            Input.WINDOW_UPDATE: State.HALF_CLOSED_LOCAL,
            Input.RST_STREAM: State.CLOSED,
            Input.SEND_RST: State.RESET,
        },
        State.CLOSED: {
            Input.HEADERS: Reaction.CONNECTION_STREAM_CLOSED,
            Input.HEADERS_END: Reaction.CONNECTION_STREAM_CLOSED,
            Input.DATA: Reaction.STREAM_CLOSED,
            Input.DATA_END: Reaction.STREAM_CLOSED,
            Input.WINDOW_UPDATE: Reaction.IGNORE,
            Input.RST_STREAM: Reaction.IGNORE,
        },
        State.RESET: {
            Input.HEADERS: Reaction.IGNORE,
            Input.HEADERS_END: Reaction.IGNORE,
            Input.DATA: Reaction.IGNORE,
            Input.DATA_END: Reaction.IGNORE,
            Input.WINDOW_UPDATE: Reaction.IGNORE,
            Input.RST_STREAM: Reaction.IGNORE,
        },
    }
)
"""What is not in the table is a connection error PROTOCOL_ERROR, or a mistake of our own."""

REACTION_CODES: Mapping[Reaction, ErrorCode] = MappingProxyType(
    {
        Reaction.STREAM_CLOSED: ErrorCode.STREAM_CLOSED,
        Reaction.MALFORMED: ErrorCode.PROTOCOL_ERROR,
        Reaction.CONNECTION_STREAM_CLOSED: ErrorCode.STREAM_CLOSED,
        Reaction.CONNECTION_PROTOCOL_ERROR: ErrorCode.PROTOCOL_ERROR,
    }
)
"""The error code of each reaction that has one."""

NEXT: tuple[tuple[State | Reaction, ...], ...] = tuple(
    tuple(
        TRANSITIONS[state].get(happening, Reaction.CONNECTION_PROTOCOL_ERROR) for happening in Input
    )
    for state in State
)
"""The table as `NEXT[state][input]`, which takes a third of the time of two dictionaries."""
