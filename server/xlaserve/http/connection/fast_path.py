"""The HTTP fast path: requests with known header blocks need no parser or task.

It does not parse header blocks: the general path has parsed the same bytes before and cached a plan
for them. It never rejects a request; the general path handles every one that it does not recognize.
"""

import asyncio
import time
from typing import Protocol

from xlaserve.errors.panics import ENDS
from xlaserve.http.connection.ahead import Ahead
from xlaserve.http.connection.head_shape import ShapedPlans
from xlaserve.http.connection.held import Held
from xlaserve.http.connection.plans import Plan, Plans
from xlaserve.http.connection.response_head import response_head, short_head
from xlaserve.http.connection.states import COLUMNS, Input, Lifecycle, State
from xlaserve.http.edge import translate
from xlaserve.http.headers import BlockHeaders
from xlaserve.http.messages import JOINED_BYTES, HttpResponse
from xlaserve.serving.call import Peer
from xlaserve.serving.inference import Pending

_END = b"\r\n\r\n"
_PARSED_TIMES = 12
"""Maximum memory of a parsed short body relative to its size; the worst case is short strings."""

# Columns of the state table, used directly in the hot path.
_BEGUN = COLUMNS[Input.BEGUN]
_ANSWERED = COLUMNS[Input.ANSWER]
_ANSWERED_LAST = COLUMNS[Input.LAST_ANSWER]


class Draining(Protocol):
    """The server state that a fast path reads."""

    is_draining: bool
    """Whether every response closes its connection."""


class Owner(Protocol):
    """The connection that owns a fast path."""

    held: Held
    """Memory account of the connection."""
    peer: Peer
    """The client."""

    @property
    def server(self) -> Draining:
        """Return the server that accepted the connection."""
        ...

    def take_over(self, data: bytes) -> None:
        """Continue on the general path; `data` starts at the beginning of a request."""
        ...

    def force_close(self) -> None:
        """Stop reading, and close the connection once the write buffer is empty."""
        ...


class FastPath(Lifecycle):
    """Answers those requests of a connection whose header blocks are known."""

    __slots__ = (
        "_account",
        "_ahead",
        "_body_seconds",
        "_call",
        "_clock",
        "_loop",
        "_opened_ns",
        "_owner",
        "_part",
        "_peer",
        "_plan",
        "_plans",
        "_server",
        "_shaped",
        "_timer",
        "_transport",
        "_turn",
        "_waited_seconds",
        "answered_at",
    )

    def __init__(
        self, plans: Plans, owner: Owner, transport: asyncio.Transport, body_seconds: float
    ) -> None:
        super().__init__()
        self._plans = plans
        self._shaped = ShapedPlans(plans)
        self._owner = owner
        self._server = owner.server
        self._peer = owner.peer
        self._account = owner.held.account
        self._transport = transport
        self._body_seconds = body_seconds
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self.answered_at = 0.0
        """Loop time of the last response."""
        self._ahead = Ahead(transport)
        self._plan: Plan | None = None
        """Plan of the request that is being received or executed."""
        self._call: Pending | asyncio.Task[HttpResponse] | None = None
        """The request in flight, or the task that finishes its response."""
        self._part = bytearray()
        """In state RECEIVING: the received bytes of the request."""
        self._timer: asyncio.TimerHandle | None = None
        """In state RECEIVING: timer after which the general path takes over the request."""
        self._turn: asyncio.Handle | None = None
        """In state QUEUED: handle of the scheduled callback."""
        self._waited_seconds = 0.0
        self._opened_ns = 0
        """Arrival time of the header block of an incomplete request; 0 if there is none."""

    # --- Received bytes ---

    def receive(self, data: bytes) -> None:
        """Handle received bytes; in state IDLE they start at the beginning of a request."""
        if self.state is State.IDLE:
            self.read(data)
        elif self.state is State.RECEIVING:
            self._receive_body(data)
        else:
            self._keep(data)

    def read(self, data: bytes) -> None:
        """Handle bytes in state IDLE; they start at the beginning of a request."""
        end = data.find(_END) + len(_END)
        head = data[:end] if end >= len(_END) else b""
        plan = self._plans.get(head) or self._shaped.find(head)
        if plan is None or (self._account.ledger.is_pressed and not self._admits(plan)):
            self.change(Input.GENERAL_BEGUN)
            self._owner.take_over(data)
            return
        size = end + plan.length
        if len(data) == size:
            self._begin(plan, head, memoryview(data)[end:])
        elif len(data) < size:
            if self._server.is_draining:
                # While the server drains, only the general path enforces the shorter body timeout.
                self.change(Input.GENERAL_BEGUN)
                self._owner.take_over(data)
            else:
                self._await_body(plan, data)
        else:
            self._begin(plan, head, memoryview(data)[end:size])
            self._keep(memoryview(data)[size:])

    def _admits(self, plan: Plan) -> bool:
        """Tell whether memory is available for a body; if not, the general path makes it wait."""
        return self._account.admits(_PARSED_TIMES * plan.length)

    def _await_body(self, plan: Plan, data: bytes) -> None:
        self.change(Input.PART)
        self._opened_ns = time.perf_counter_ns()
        self._plan = plan
        self._part += data
        self._count_ahead()
        self._timer = self._loop.call_later(self._body_seconds, self.hand_over)

    def _receive_body(self, data: bytes) -> None:
        self._part += data
        self._count_ahead()
        plan = self._plan
        assert plan is not None
        if len(self._part) >= len(head_of(self._part)) + plan.length:
            whole = self._take_part()
            self.change(Input.WHOLE)
            self.read(whole)

    def _take_part(self) -> bytes:
        assert self._timer is not None
        self._timer.cancel()
        self._timer = None
        data = bytes(self._part)
        self._part.clear()
        self._count_ahead()
        return data

    def hand_over(self) -> None:
        """Move a request with an incomplete body to the general path."""
        if self.state is State.RECEIVING:
            assert self._timer is not None
            left = self._timer.when() - self._loop.time()
            self._waited_seconds = self._body_seconds - max(0.0, left)
            data = self._take_part()
            self.change(Input.GENERAL_BEGUN)
            self._owner.take_over(data)

    def take_waited_seconds(self) -> float:
        """Return, and reset, the seconds that a handed-over request has waited for its body."""
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def take_opened_ns(self) -> int:
        """Return and reset the arrival time of a handed-over request's header block, or 0."""
        opened, self._opened_ns = self._opened_ns, 0
        return opened

    # --- Pipelined bytes ---

    def _count_ahead(self) -> None:
        self._owner.held.set_ahead(len(self._ahead.data) + len(self._part))

    @property
    def has_ahead(self) -> bool:
        """Tell whether pipelined bytes are buffered."""
        return bool(self._ahead.data)

    def _keep(self, data: bytes | memoryview) -> None:
        if self.state is State.CLOSING:
            return
        self._ahead.add(data)
        self._count_ahead()
        if self.state is State.IDLE:
            self._queue()
        else:
            self.change(Input.AHEAD)

    def _queue(self) -> None:
        """Schedule the next pipelined request, so that other connections are served in between."""
        if self._ahead.data and self.state is State.IDLE:
            self.change(Input.AHEAD)
            self._turn = self._loop.call_soon(self._take_turn)

    def return_from_general(self) -> None:
        """Continue with the bytes that arrived during a general-path request."""
        self.change(Input.GENERAL_DONE)
        self._queue()

    def _take_turn(self) -> None:
        self._turn = None
        if self._transport.is_closing():
            return
        try:
            self.change(Input.TURN)
            # Take only the first request, rather than copy all pipelined bytes for each one.
            head = head_of(self._ahead.data)
            plan = self._plans.get(head) or self._shaped.find(head)
            size = None if plan is None else len(head) + plan.length
            # Take the bytes before `read`, which may pause reading again: `take` may resume it.
            data = self._ahead.take(size)
            self._count_ahead()
            self.read(data)
            self._queue()
        except BaseException:
            # Like asyncio when data_received raises: the client must not wait forever.
            self._transport.abort()
            raise

    def resume(self) -> None:
        """Resume pipelined requests, because the client reads its responses again."""
        self.change(Input.RESUME)
        self._queue()

    # --- Requests ---

    def _begin(self, plan: Plan, head: bytes, body: memoryview) -> None:
        opened, self._opened_ns = self._opened_ns, 0
        try:
            # Use the headers of this request, not of the request that the plan was made from.
            begun = plan.begin(body, self._done, BlockHeaders(head), self._peer, opened)
        except ENDS:
            raise
        except BaseException as error:
            self._fail(plan, error)
            return
        if type(begun) is HttpResponse:
            if plan.finish is None:
                self._write(plan, begun)
            else:
                self._finish(plan, begun)
            return
        self.state = _BEGUN[self.state]
        self._plan = plan
        self._call = begun  # type: ignore[assignment]
        # An immediate response is not charged: its parsed body is already freed.
        self._account.hold(_PARSED_TIMES * plan.length)

    def _done(self, result: HttpResponse | BaseException) -> None:
        """Handle the response to the request in flight."""
        plan = self._plan
        assert plan is not None
        self._call = None
        self._account.release(_PARSED_TIMES * plan.length)
        if type(result) is not HttpResponse:
            self._fail(plan, result)  # type: ignore[arg-type]
        elif plan.finish is None:
            self._write(plan, result)
        else:
            self._finish(plan, result)
        if self._ahead.data:
            self._queue()

    def _fail(self, plan: Plan, error: BaseException) -> None:
        if not isinstance(error, ENDS):
            self._finish(plan, translate(error, method=plan.method, path=plan.path))
        else:
            # The call was cancelled: close the connection, as when a handler is cancelled.
            self.end(Input.CLOSE)
            self._owner.force_close()

    def _finish(self, plan: Plan, answer: HttpResponse) -> None:
        """Write a response, possibly after a task has compressed it."""
        finishing = plan.finish(answer, self._account) if plan.finish is not None else None
        if finishing is None:
            self._write(plan, answer)
            return
        if self.state is State.IDLE:
            self.change(Input.BEGUN)
        self._plan = plan
        self._call = finishing
        self._account.hold(_PARSED_TIMES * plan.length)
        finishing.add_done_callback(self._finished)

    def _finished(self, finishing: "asyncio.Task[HttpResponse]") -> None:
        if self._call is not finishing:
            return
        assert self._plan is not None
        self._call = None
        self._account.release(_PARSED_TIMES * self._plan.length)
        try:
            self._write(self._plan, finishing.result())
        except BaseException as error:  # every error must be answered: the client waits
            self._fail(self._plan, error)
        self._queue()

    # --- Answers ---

    def _write(self, plan: Plan, answer: HttpResponse) -> None:
        transport, is_last = self._transport, self._server.is_draining
        if transport.is_closing():
            self.end(Input.CLOSE)
            return
        # Change the state first, since a write can pause the transport and so set BLOCKED.
        self.state = (_ANSWERED_LAST if is_last else _ANSWERED)[self.state]
        parts = answer.parts
        body = parts[0] if len(parts) == 1 else None
        if type(body) is bytes and len(body) <= JOINED_BYTES and not (answer.headers or is_last):
            head = short_head(answer.status, answer.content_type, len(body), int(time.time()))
            transport.write(head + body)
        else:
            self._write_parts(plan, answer, is_last=is_last)
        self.answered_at = self._clock()
        if is_last:
            self._ahead.clear()
            transport.close()

    def _write_parts(self, plan: Plan, answer: HttpResponse, *, is_last: bool) -> None:
        transport, size = self._transport, answer.size
        if size > JOINED_BYTES:
            self._owner.held.begin_admitted(size)
        head = response_head(answer, size, is_last=is_last)
        if size <= JOINED_BYTES:
            transport.write(b"".join((head, *answer.parts)))
        else:
            transport.write(head)
            for part in answer.parts:
                transport.write(part)
            self._owner.held.end_answer()

    # --- Shutdown ---

    def end(self, happening: Input) -> None:
        """Cancel the request in flight after CLOSE or LOST, and discard buffered bytes."""
        self.change(happening)
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        for later in (self._timer, self._turn):
            if later is not None:
                later.cancel()
        self._timer = self._turn = None
        self._part.clear()
        self._ahead.clear()

    def abort(self) -> None:
        """Abort the connection, and discard unsent bytes."""
        self._transport.abort()


def head_of(data: bytes | bytearray) -> bytes:
    """Return the header block including its empty line, or empty bytes if it is incomplete."""
    end = data.find(_END)
    return bytes(data[: end + len(_END)]) if end >= 0 else b""
