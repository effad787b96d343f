"""One request and its answer, as the server sees them."""

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, Protocol, TypeAlias

from xlaserve.grpc.http2.frames import ErrorCode
from xlaserve.grpc.http2.headers import Head
from xlaserve.grpc.http2.messages import Placement, Problem, StreamingReader, UnaryReader
from xlaserve.grpc.http2.states import NEXT, OPENED, Input, Reaction, State
from xlaserve.net.ledger import Account

Buffer: TypeAlias = bytes | memoryview


class Call(Protocol):
    """Anything that answers a request and can be cancelled when its client gives up."""

    @property
    def awaits_client(self) -> bool:
        """Tell whether nothing is done until the client sends something."""
        ...

    def cancel(self, reason: str) -> None:
        """Stop: the client has reset the stream, or its connection has ended."""
        ...


class Route(Protocol):
    """The route of the requests of one kind."""

    @property
    def message_first(self) -> bool:
        """Tell whether the request begins when its one message is there, not with its headers."""
        ...

    @property
    def placement(self) -> Placement | None:
        """Return what finds the part of a long message that should be aligned."""
        ...

    def begin(self, stream: "ServerStream") -> None:
        """Answer the request, now or later. `stream.problem` is to be looked at first."""
        ...


class Output(Protocol):
    """The sender of the connection, as its streams know it."""

    def answer(
        self,
        stream: "ServerStream",
        head: bytes,
        parts: Sequence[Buffer],
        size: int,
        trailers: bytes,
    ) -> bool:
        """Send a whole answer."""
        ...

    def headers(self, stream: "ServerStream", block: bytes, *, end: bool) -> None:
        """Send headers or trailers."""
        ...

    def data(
        self, stream: "ServerStream", parts: Sequence[Buffer], size: int, *, end: bool
    ) -> bool:
        """Send a part of an answer."""
        ...

    def short_data(self, stream: "ServerStream", parts: Sequence[Buffer], size: int) -> bool:
        """Send a part of an answer that leaves at once; false, and nothing is sent, for others."""
        ...


class Owner(Protocol):
    """The streams of a connection together, as each of them knows them."""

    tick: int
    """Counts the sweeps for what takes too long."""

    peer_window: int
    """Client's window of a new stream, in bytes."""

    now: Callable[[], float]
    """Returns the time by a clock that goes with that of the event loop."""

    @property
    def sender(self) -> Output:
        """Return the sender of the connection."""
        ...

    @property
    def stream_window(self) -> int:
        """Return what the client may send of a new stream, in bytes."""
        ...

    @property
    def account(self) -> Account:
        """Return the account of what the connection holds."""
        ...

    def hold(self, stream: "ServerStream", count: int) -> None:
        """Count this many more bytes that are held for a stream, or fewer, until it is closed."""
        ...

    def reserve(self, stream: "ServerStream", count: int) -> bool:
        """Count this many bytes for a stream that are to come; false where there is no memory."""
        ...

    def reset_stream(self, stream: "ServerStream", code: ErrorCode) -> None:
        """Close a stream at once with a RST_STREAM."""
        ...

    def complete(self, stream: "ServerStream") -> None:
        """Take the step of a frame with END_STREAM that was sent, and close the stream."""
        ...

    def grant(self, stream: "ServerStream", wanted: int) -> None:
        """Let the client send at least this many more bytes."""
        ...


class ServerStream:
    """One stream. What most requests never need are defaults of the class, to be made quickly."""

    # --- the request ---

    fresh = True
    """Whether it has only received its headers, and expects a message."""
    reader: UnaryReader | StreamingReader | None = None
    message: Buffer | None = None
    """The complete message of a unary request."""
    compressed = False
    problem: Problem | None = None
    begun = False
    """Whether the request was passed to its route."""
    call: Call | None = None
    """The call in flight that answers it."""
    arriving = False
    """Whether its last frame is incomplete: its state is half-closed already."""
    deadline: float | None = None
    """When its client stops waiting, by the clock of the event loop; None for never."""
    opened_ns = 0
    """When its headers were there, by the clock of the engine."""
    received = 0
    """Bytes of DATA, without padding."""
    charged = 0
    """Bytes of the ledger for its messages."""
    reserved = 0
    """Those of them not received yet; for streaming requests only."""

    # --- the answer ---

    on_sent: Callable[[], None] | None = None
    """Called when all pending data was sent."""
    headers_sent = False
    pending: "deque[Buffer] | None" = None
    """DATA that waits for the client; its bytes are in `unsent`."""
    unsent = 0
    keeps_more = False
    """Whether pending data may be views of much larger arrays."""
    parked = 0
    """Bytes of the ledger for its answer."""
    ending = False
    """Whether the last pending frame ends the stream."""
    trailers: bytes | None = None
    """The trailers to send after the pending data."""

    def __init__(self, owner: Owner, stream_id: int, head: Head[Any], happening: Input) -> None:
        """Open it by its HEADERS or HEADERS_END."""
        self.state = OPENED[happening]
        """Set from the table, here and by `advance`, and nowhere else."""
        self.owner = owner
        self.output = owner.sender
        self.id = stream_id
        self.head = head
        self.send_window = owner.peer_window
        self.recv_window = owner.stream_window
        self.opened_ns = perf_counter_ns()
        self.tick = owner.tick
        """Sweep in which it was opened, then in which bytes of its answer left last."""
        if head.timeout is not None:
            # From now on, however long its message takes to come (gRPC over HTTP/2, Timeout).
            self.deadline = owner.now() + head.timeout

    def advance(self, happening: Input) -> State | Reaction:
        """Take the step that the table has for an input; or return its reaction, and take none.

        Invariant: nothing else changes `state`, so that the table tells all that can happen.
        """
        following = NEXT[self.state][happening]
        if type(following) is State:
            self.state = following
        return following

    # --- the request ---

    def begin(self, problem: Problem | None = None) -> None:
        """Pass the request to its route, once, with its message or its problem."""
        self.begun = True
        self.fresh = False
        if problem is not None:
            self.problem = problem
            self.message = None
        route: Route | None = self.head.route
        assert route is not None  # found before the stream was opened
        route.begin(self)

    def end_request(self) -> None:
        """Begin the request that has come whole, if its route has not got it yet."""
        reader = self.reader
        if isinstance(reader, StreamingReader):
            reader.on_data()
        elif self.begun:
            return
        elif reader is None:
            self.begin(Problem.NONE if self.message is None else None)
        else:
            problem = reader.end()
            if problem is None:
                self.message = reader.message()
                self.compressed = reader.compressed
                self.reader = None  # or the memory would be kept until the answer has left
            self.begin(problem)

    def cancel(self, reason: str) -> None:
        """Cancel the call that answers it, once, if there is one."""
        call, self.call = self.call, None
        if call is not None:
            call.cancel(reason)

    # --- the answer ---

    def answer(self, head: bytes, parts: Sequence[Buffer], size: int, trailers: bytes) -> bool:
        """Send a whole answer; false when it had to wait and may not be parked.

        `parts` has `size` bytes, the prefix of the message among them. `head` and `trailers` are
        header blocks. Nothing was sent before.
        """
        return self.output.answer(self, head, parts, size, trailers)

    def send_headers(self, block: bytes, *, end: bool = False) -> None:
        """Send headers, or trailers behind all that is pending."""
        self.output.headers(self, block, end=end)

    def send_data(self, parts: Sequence[Buffer], size: int, *, end: bool = False) -> bool:
        """Send bytes of the answer; false as for `answer`."""
        return self.output.data(self, parts, size, end=end)

    def reset(self, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        """Close the stream at once, whatever is pending."""
        self.owner.reset_stream(self, code)

    # --- what it is ---

    @property
    def open(self) -> bool:
        """Tell whether an answer can still be sent."""
        return self.state in (State.OPEN, State.HALF_CLOSED_REMOTE) and not self.ending

    @property
    def ended_by_client(self) -> bool:
        """Tell whether all has come that the client will send."""
        return self.state is not State.OPEN and not self.arriving

    @property
    def awaits_client(self) -> bool:
        """Tell whether nothing is done until the client sends something."""
        if not self.begun:
            return True
        return self.call is not None and self.call.awaits_client

    def grant(self, wanted: int) -> None:
        """Let the client send at least this many more bytes (RFC 9113 6.9)."""
        self.owner.grant(self, wanted)

    def reserve(self, count: int) -> bool:
        """Count so many bytes for its messages that are to come; false where there is no memory."""
        return self.owner.reserve(self, count)

    def expect(self, count: int) -> bool:
        """Let the client send so many bytes more of a message; false where there is no memory."""
        more = count - self.reserved
        if more > 0:
            if not self.reserve(more):
                return False
            self.reserved = count
        owner = self.owner
        if self.recv_window < count or self.recv_window < owner.stream_window >> 1:
            owner.grant(self, count)  # which looks closer: most requests end here
        return True

    def hold(self, count: int) -> None:
        """Count this many bytes of its messages more, or fewer; what came is counted already."""
        self.owner.hold(self, count)
