"""One HTTP/2 stream: a request and its response."""

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
    """The call that answers a stream's request; the stream cancels it if the client goes away."""

    @property
    def awaits_client(self) -> bool:
        """Tell whether the call is waiting for the client's next message."""
        ...

    def cancel(self, reason: str) -> None:
        """Cancel the call: the client has reset the stream, or the connection has ended."""
        ...


class Route(Protocol):
    """Handles all requests of one kind."""

    @property
    def message_first(self) -> bool:
        """Tell whether to call `begin` after the complete message, not after the headers."""
        ...

    @property
    def placement(self) -> Placement | None:
        """Return the function that locates the tensor to align in a long message, or None."""
        ...

    def begin(self, stream: "ServerStream") -> None:
        """Start to answer the request; if `stream.problem` is set, answer with an error."""
        ...


class Output(Protocol):
    """The interface of the connection's `Sender` for its streams."""

    def answer(
        self,
        stream: "ServerStream",
        head: bytes,
        parts: Sequence[Buffer],
        size: int,
        trailers: bytes,
    ) -> bool:
        """Send a complete response; without memory for it, send nothing and return false."""
        ...

    def headers(self, stream: "ServerStream", block: bytes, *, end: bool) -> None:
        """Send headers, or trailers if `end` is set."""
        ...

    def data(
        self, stream: "ServerStream", parts: Sequence[Buffer], size: int, *, end: bool
    ) -> bool:
        """Send DATA, or return false and send nothing if there is no memory to queue it."""
        ...

    def short_data(self, stream: "ServerStream", parts: Sequence[Buffer], size: int) -> bool:
        """Send a short DATA frame, or return false and send nothing if it would have to wait."""
        ...


class Owner(Protocol):
    """The interface of a connection's `Streams` for each stream."""

    tick: int
    """Number of sweeps so far; time limits of streams are measured in sweeps."""

    peer_window: int
    """Initial send window of a stream in bytes, set by the client."""

    now: Callable[[], float]
    """Returns the current time, by the same clock as the event loop."""

    @property
    def sender(self) -> Output:
        """Return the sender of the connection."""
        ...

    @property
    def stream_window(self) -> int:
        """Return the initial receive window of a stream in bytes."""
        ...

    @property
    def account(self) -> Account:
        """Return the connection's account in the memory ledger."""
        ...

    def hold(self, stream: "ServerStream", count: int) -> None:
        """Add bytes to those held in the ledger for a stream; a negative count releases bytes."""
        ...

    def reserve(self, stream: "ServerStream", count: int) -> bool:
        """Reserve bytes in the ledger for a stream; false if there is no memory for them."""
        ...

    def reset_stream(self, stream: "ServerStream", code: ErrorCode) -> None:
        """Send RST_STREAM, and close the stream."""
        ...

    def complete(self, stream: "ServerStream") -> None:
        """Close a stream after a frame with END_STREAM was sent on it."""
        ...

    def grant(self, stream: "ServerStream", wanted: int) -> None:
        """Let the client send at least `wanted` more bytes on a stream."""
        ...


class ServerStream:
    """One stream. Attributes that most requests never set are class defaults, to save time."""

    # --- the request ---

    fresh = True
    """Whether only headers were received, and the request has not been passed to its route."""
    reader: UnaryReader | StreamingReader | None = None
    message: Buffer | None = None
    """The complete message of a unary request."""
    compressed = False
    problem: Problem | None = None
    begun = False
    """Whether the request was passed to its route."""
    call: Call | None = None
    """The pending call that answers the request."""
    arriving = False
    """Whether the frame with END_STREAM is incomplete; `state` is already half-closed then."""
    deadline: float | None = None
    """The client's deadline in event loop time, or None."""
    opened_ns = 0
    """Arrival of the headers, by `perf_counter_ns`."""
    received = 0
    """Bytes of DATA received, without padding."""
    charged = 0
    """Bytes held in the ledger for the stream's messages."""
    reserved = 0
    """Bytes of `charged` that were not received yet; only for streaming requests."""

    # --- the response ---

    on_sent: Callable[[], None] | None = None
    """Called when all pending data was sent."""
    headers_sent = False
    pending: "deque[Buffer] | None" = None
    """DATA blocked by flow control or backpressure; `unsent` is its length."""
    unsent = 0
    keeps_more = False
    """Whether pending data may be views of much larger arrays."""
    parked = 0
    """Bytes held in the ledger for the pending response."""
    ending = False
    """Whether the last pending frame ends the stream."""
    trailers: bytes | None = None
    """The trailers to send after the pending data."""

    def __init__(self, owner: Owner, stream_id: int, head: Head[Any], happening: Input) -> None:
        """Open the stream; `happening` is HEADERS or HEADERS_END."""
        self.state = OPENED[happening]
        """Only set from the state table, here and in `advance`."""
        self.owner = owner
        self.output = owner.sender
        self.id = stream_id
        self.head = head
        self.send_window = owner.peer_window
        self.recv_window = owner.stream_window
        self.opened_ns = perf_counter_ns()
        self.tick = owner.tick
        """Sweep in which the stream was opened or, later, last sent bytes of the response."""
        if head.timeout is not None:
            # The timeout counts from the headers, not from the message.
            self.deadline = owner.now() + head.timeout

    def advance(self, happening: Input) -> State | Reaction:
        """Apply an input to the state table; return the new state, or the reaction if none.

        Invariant: nothing else changes `state`, so the table shows all possible transitions.
        """
        following = NEXT[self.state][happening]
        if type(following) is State:
            self.state = following
        return following

    # --- the request ---

    def begin(self, problem: Problem | None = None) -> None:
        """Pass the request to its route, once, with its message or a problem."""
        self.begun = True
        self.fresh = False
        if problem is not None:
            self.problem = problem
            self.message = None
        route: Route | None = self.head.route
        assert route is not None  # a stream is opened only if the request has a route
        route.begin(self)

    def end_request(self) -> None:
        """Handle the end of the request: pass it to its route if that was not done yet."""
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
                self.reader = None  # otherwise it would keep the message until the response is sent
            self.begin(problem)

    def cancel(self, reason: str) -> None:
        """Cancel the pending call, if there is one."""
        call, self.call = self.call, None
        if call is not None:
            call.cancel(reason)

    # --- the response ---

    def answer(self, head: bytes, parts: Sequence[Buffer], size: int, trailers: bytes) -> bool:
        """Send a complete response, or return false and send nothing if there is no memory for it.

        `head` and `trailers` are header blocks; `parts` have `size` bytes, including the length
        prefix of the message. Nothing may have been sent on the stream before.
        """
        return self.output.answer(self, head, parts, size, trailers)

    def send_headers(self, block: bytes, *, end: bool = False) -> None:
        """Send headers, or, if `end` is set, trailers after all pending data."""
        self.output.headers(self, block, end=end)

    def send_data(self, parts: Sequence[Buffer], size: int, *, end: bool = False) -> bool:
        """Send bytes of the response, or return false and send nothing if they cannot be queued."""
        return self.output.data(self, parts, size, end=end)

    def reset(self, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        """Send RST_STREAM, and drop pending data."""
        self.owner.reset_stream(self, code)

    # --- state ---

    @property
    def open(self) -> bool:
        """Tell whether a response can still be sent."""
        return self.state in (State.OPEN, State.HALF_CLOSED_REMOTE) and not self.ending

    @property
    def ended_by_client(self) -> bool:
        """Tell whether the client has sent its complete request."""
        return self.state is not State.OPEN and not self.arriving

    @property
    def awaits_client(self) -> bool:
        """Tell whether the request waits for more data from the client."""
        if not self.begun:
            return True
        return self.call is not None and self.call.awaits_client

    def grant(self, wanted: int) -> None:
        """Let the client send at least `wanted` more bytes (RFC 9113 6.9)."""
        self.owner.grant(self, wanted)

    def reserve(self, count: int) -> bool:
        """Reserve bytes in the ledger for messages; false if there is no memory for them."""
        return self.owner.reserve(self, count)

    def expect(self, count: int) -> bool:
        """Reserve memory for `count` more bytes of a message, and let the client send them.

        Return false if there is no memory for them.
        """
        more = count - self.reserved
        if more > 0:
            if not self.reserve(more):
                return False
            self.reserved = count
        owner = self.owner
        if self.recv_window < count or self.recv_window < owner.stream_window >> 1:
            owner.grant(self, count)  # a cheap check first; `grant` repeats it in full
        return True

    def hold(self, count: int) -> None:
        """Add bytes to those held in the ledger for messages; a negative count releases bytes."""
        self.owner.hold(self, count)
