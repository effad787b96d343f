"""The HTTP fast path: requests with known header blocks need no parser or task.

It parses nothing: what a header block means it was told when the general path had read the same
bytes. It only accepts. What it does not recognise goes the general path, which has the last word.
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
"""Maximum expansion of a short body by parsing: strings of two letters."""

# The columns of the table that ordinary requests pass.
_BEGUN = COLUMNS[Input.BEGUN]
_ANSWERED = COLUMNS[Input.ANSWER]
_ANSWERED_LAST = COLUMNS[Input.LAST_ANSWER]


class Draining(Protocol):
    """The server's state, as far as needed here."""

    is_draining: bool
    """Whether each answer closes its connection."""


class Owner(Protocol):
    """The connection whose bytes a fast path takes."""

    held: Held
    """The account of the connection."""
    peer: Peer
    """The client."""

    @property
    def server(self) -> Draining:
        """Return its server."""
        ...

    def take_over(self, data: bytes) -> None:
        """Give the general path bytes that begin where a request does."""
        ...

    def force_close(self) -> None:
        """Close the connection."""
        ...


class FastPath(Lifecycle):
    """Answers the requests of one connection whose header blocks are known."""

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
        """Loop time of the last answer."""
        self._ahead = Ahead(transport)
        self._plan: Plan | None = None
        """Plan of the request received or executed."""
        self._call: Pending | asyncio.Task[HttpResponse] | None = None
        """The request in flight, or its answer being prepared."""
        self._part = bytearray()
        """While RECEIVING: the request, as much of it as has come."""
        self._timer: asyncio.TimerHandle | None = None
        """While RECEIVING: when the request is handed over."""
        self._turn: asyncio.Handle | None = None
        """While QUEUED: the scheduled iteration."""
        self._waited_seconds = 0.0
        self._opened_ns = 0
        """When the header block of a pending body arrived; 0 for none."""

    # --- bytes ---

    def receive(self, data: bytes) -> None:
        """Take bytes; in IDLE they begin where a request does."""
        if self.state is State.IDLE:
            self.read(data)
        elif self.state is State.RECEIVING:
            self._receive_body(data)
        else:
            self._keep(data)

    def read(self, data: bytes) -> None:
        """Take bytes that begin where a request does, in IDLE."""
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
                # The general path alone gives a body no longer than the server still has.
                self.change(Input.GENERAL_BEGUN)
                self._owner.take_over(data)
            else:
                self._await_body(plan, data)
        else:
            self._begin(plan, head, memoryview(data)[end:size])
            self._keep(memoryview(data)[size:])

    def _admits(self, plan: Plan) -> bool:
        """Tell whether a body may be executed under memory pressure, which may make it wait."""
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
        """Give the general path a request with an incomplete body, if there is one."""
        if self.state is State.RECEIVING:
            assert self._timer is not None
            left = self._timer.when() - self._loop.time()
            self._waited_seconds = self._body_seconds - max(0.0, left)
            data = self._take_part()
            self.change(Input.GENERAL_BEGUN)
            self._owner.take_over(data)

    def take_waited_seconds(self) -> float:
        """Return how long a request waited for its body before it was handed over, once."""
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def take_opened_ns(self) -> int:
        """Return once when the header block of a pending body arrived; else 0."""
        opened, self._opened_ns = self._opened_ns, 0
        return opened

    # --- what was sent ahead ---

    def _count_ahead(self) -> None:
        self._owner.held.set_ahead(len(self._ahead.data) + len(self._part))

    @property
    def has_ahead(self) -> bool:
        """Tell whether unread pipelined bytes are kept."""
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
        """Yield to other connections if requests are pipelined."""
        if self._ahead.data and self.state is State.IDLE:
            self.change(Input.AHEAD)
            self._turn = self._loop.call_soon(self._take_turn)

    def return_from_general(self) -> None:
        """Continue with bytes that came during a general-path request."""
        self.change(Input.GENERAL_DONE)
        self._queue()

    def _take_turn(self) -> None:
        self._turn = None
        if self._transport.is_closing():
            return
        try:
            self.change(Input.TURN)
            # The first request alone: what is behind it is not copied for each one.
            head = head_of(self._ahead.data)
            plan = self._plans.get(head) or self._shaped.find(head)
            size = None if plan is None else len(head) + plan.length
            # Reading goes on before the bytes are handed on: their receiver may pause it again.
            data = self._ahead.take(size)
            self._count_ahead()
            self.read(data)
            self._queue()
        except BaseException:
            # As where asyncio hands over bytes: its client is not to wait for ever.
            self._transport.abort()
            raise

    def resume(self) -> None:
        """Go on, since the client reads its answers again."""
        self.change(Input.RESUME)
        self._queue()

    # --- requests ---

    def _begin(self, plan: Plan, head: bytes, body: memoryview) -> None:
        opened, self._opened_ns = self._opened_ns, 0
        try:
            # The headers of this request, and not of the one that the plan was made of.
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
        # What is answered at once was there no longer than the bytes that it came in.
        self._account.hold(_PARSED_TIMES * plan.length)

    def _done(self, result: HttpResponse | BaseException) -> None:
        """Take the answer to the request in flight."""
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
            # It was cancelled: so ends a connection whose handler is.
            self.end(Input.CLOSE)
            self._owner.force_close()

    def _finish(self, plan: Plan, answer: HttpResponse) -> None:
        """Write an answer, perhaps not as it is and not now."""
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
        except BaseException as error:  # whatever it is, the client waits
            self._fail(self._plan, error)
        self._queue()

    # --- answers ---

    def _write(self, plan: Plan, answer: HttpResponse) -> None:
        transport, is_last = self._transport, self._server.is_draining
        if transport.is_closing():
            self.end(Input.CLOSE)
            return
        # First, since a write can make the connection BLOCKED.
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

    # --- shutdown ---

    def end(self, happening: Input) -> None:
        """Cancel unanswered requests after CLOSE or LOST."""
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
        """Cut the connection off, unsent bytes included."""
        self._transport.abort()


def head_of(data: bytes | bytearray) -> bytes:
    """Return request line and headers with the empty line; empty if incomplete."""
    end = data.find(_END)
    return bytes(data[: end + len(_END)]) if end >= 0 else b""
