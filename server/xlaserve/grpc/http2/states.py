"""The state machine of an HTTP/2 stream, as a table (RFC 9113 5.1)."""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import TypeAlias

from xlaserve.grpc.http2.frames import ErrorCode


class State(IntEnum):
    """The state of a stream, from the server's point of view."""

    IDLE = 0
    OPEN = 1
    HALF_CLOSED_REMOTE = 2
    """The client has ended its request; the server has not ended the response."""
    HALF_CLOSED_LOCAL = 3
    """The server has ended its response; further DATA of the request is dropped."""
    CLOSED = 4
    RESET = 5
    """The server has reset the stream; frames that the client sent before it knew are ignored."""


class Input(IntEnum):
    """An event of a stream: a frame received or sent, or the end of the connection.

    PRIORITY is missing because it is allowed in every state and never changes it (RFC 9113 5.1).
    """

    HEADERS = 0
    """HEADERS without END_STREAM received; HEADERS_END and DATA_END are frames with END_STREAM."""
    HEADERS_END = 1
    DATA = 2
    DATA_END = 3
    WINDOW_UPDATE = 4
    RST_STREAM = 5
    SEND_END = 6
    """The server sends a frame with END_STREAM."""
    SEND_RST = 7
    CONNECTION_END = 8
    """Either side ends the connection, and with it all streams (RFC 9113 5.4.1, 6.8)."""


class Reaction(IntEnum):
    """The server's reaction to an input that does not lead to a next state."""

    IGNORE = -1
    STREAM_CLOSED = -2
    """A stream error of type STREAM_CLOSED."""
    MALFORMED = -3
    """A stream error of type PROTOCOL_ERROR: the request is malformed (RFC 9113 8.1.1)."""
    CONNECTION_STREAM_CLOSED = -4
    """A connection error of type STREAM_CLOSED."""
    CONNECTION_PROTOCOL_ERROR = -5
    """A connection error of type PROTOCOL_ERROR."""
    FAULT = -6
    """A bug in this server, which raises AssertionError; no client can cause it."""


Row: TypeAlias = Mapping[Input, State | Reaction]

TRANSITIONS: Mapping[State, Row] = MappingProxyType(
    {
        State.IDLE: {
            Input.HEADERS: State.OPEN,
            Input.HEADERS_END: State.HALF_CLOSED_REMOTE,
            # RFC 9113 5.1, idle: anything else is a connection error.
            Input.DATA: Reaction.CONNECTION_PROTOCOL_ERROR,
            Input.DATA_END: Reaction.CONNECTION_PROTOCOL_ERROR,
            Input.WINDOW_UPDATE: Reaction.CONNECTION_PROTOCOL_ERROR,
            Input.RST_STREAM: Reaction.CONNECTION_PROTOCOL_ERROR,  # RFC 9113 6.4, too
        },
        State.OPEN: {
            Input.HEADERS: Reaction.MALFORMED,  # RFC 9113 8.1: trailers end a stream
            Input.HEADERS_END: State.HALF_CLOSED_REMOTE,
            Input.DATA: State.OPEN,
            Input.DATA_END: State.HALF_CLOSED_REMOTE,
            Input.WINDOW_UPDATE: State.OPEN,
            Input.RST_STREAM: State.CLOSED,
            Input.SEND_END: State.HALF_CLOSED_LOCAL,
            Input.SEND_RST: State.RESET,
            Input.CONNECTION_END: State.CLOSED,
        },
        State.HALF_CLOSED_REMOTE: {
            # RFC 9113 5.1, half-closed (remote): a stream error of type STREAM_CLOSED.
            Input.HEADERS: Reaction.STREAM_CLOSED,
            Input.HEADERS_END: Reaction.STREAM_CLOSED,
            Input.DATA: Reaction.STREAM_CLOSED,
            Input.DATA_END: Reaction.STREAM_CLOSED,
            Input.WINDOW_UPDATE: State.HALF_CLOSED_REMOTE,
            Input.RST_STREAM: State.CLOSED,
            Input.SEND_END: State.CLOSED,
            Input.SEND_RST: State.RESET,
            Input.CONNECTION_END: State.CLOSED,
        },
        State.HALF_CLOSED_LOCAL: {
            Input.HEADERS: Reaction.MALFORMED,  # RFC 9113 8.1, too
            Input.HEADERS_END: State.CLOSED,
            Input.DATA: State.HALF_CLOSED_LOCAL,
            Input.DATA_END: State.CLOSED,
            Input.WINDOW_UPDATE: State.HALF_CLOSED_LOCAL,
            Input.RST_STREAM: State.CLOSED,
            # RFC 9113 8.1: ask the client to stop sending a request that was already answered.
            Input.SEND_RST: State.RESET,
            Input.CONNECTION_END: State.CLOSED,
        },
        State.CLOSED: {
            # RFC 9113 5.1, closed: a connection error after END_STREAM. After RST_STREAM a stream
            # error would suffice, but the server does not remember how each stream was closed.
            Input.HEADERS: Reaction.CONNECTION_STREAM_CLOSED,
            Input.HEADERS_END: Reaction.CONNECTION_STREAM_CLOSED,
            Input.DATA: Reaction.STREAM_CLOSED,  # RFC 9113 6.1
            Input.DATA_END: Reaction.STREAM_CLOSED,
            # RFC 9113 5.1: the client may have sent these before it received END_STREAM.
            Input.WINDOW_UPDATE: Reaction.IGNORE,
            Input.RST_STREAM: Reaction.IGNORE,
            Input.SEND_RST: Reaction.IGNORE,
        },
        State.RESET: {
            # RFC 9113 5.1: the client may have sent these before it received RST_STREAM.
            Input.HEADERS: Reaction.IGNORE,
            Input.HEADERS_END: Reaction.IGNORE,
            Input.DATA: Reaction.IGNORE,
            Input.DATA_END: Reaction.IGNORE,
            Input.WINDOW_UPDATE: Reaction.IGNORE,
            Input.RST_STREAM: Reaction.IGNORE,
            Input.SEND_RST: Reaction.IGNORE,
        },
    }
)
"""All possible transitions; an input missing from a row indicates a bug in this server."""

REACTION_CODES: Mapping[Reaction, ErrorCode] = MappingProxyType(
    {
        Reaction.STREAM_CLOSED: ErrorCode.STREAM_CLOSED,
        Reaction.MALFORMED: ErrorCode.PROTOCOL_ERROR,
        Reaction.CONNECTION_STREAM_CLOSED: ErrorCode.STREAM_CLOSED,
        Reaction.CONNECTION_PROTOCOL_ERROR: ErrorCode.PROTOCOL_ERROR,
    }
)
"""The HTTP/2 error code of each reaction that is a stream or connection error."""

STREAM_ERRORS = frozenset((Reaction.STREAM_CLOSED, Reaction.MALFORMED))
"""The reactions that reset one stream; the others with an error code end the connection."""

NEXT: tuple[tuple[State | Reaction, ...], ...] = tuple(
    tuple(TRANSITIONS[state].get(happening, Reaction.FAULT) for happening in Input)
    for state in State
)
"""`TRANSITIONS` as nested tuples, `NEXT[state][input]`: three times as fast as dictionaries."""

OPENED: tuple[State, ...] = tuple(state for state in NEXT[State.IDLE] if isinstance(state, State))
"""The state of a new stream, indexed by the input that opens it: HEADERS or HEADERS_END."""
