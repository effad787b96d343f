"""The short lane of HTTP: requests whose head is known need neither a parser nor a task.

It knows no aiohttp: what a head means it was told when aiohttp had read the same bytes.
"""

import asyncio
import time
from collections.abc import Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol

from xlaserve.core.server import NAME
from xlaserve.core.serving.inference import Pending
from xlaserve.transport.rest.edge import translate
from xlaserve.transport.rest.held import Held
from xlaserve.transport.rest.messages import JOINED_BYTES, HttpResponse
from xlaserve.transport.rest.plans import Plan, Plans

_END = b"\r\n\r\n"
_HELD_BYTES = 64 << 10
"""What a connection may send ahead while it waits for an answer, and one read more."""


class Owner(Protocol):
    """The connection that a lane is part of."""

    held: Held
    """What the connection holds."""

    def otherwise(self, data: bytes) -> None:
        """Take bytes that begin where a request does."""
        ...

    def answered(self) -> None:
        """Know that a request was answered."""
        ...

    def force_close(self) -> None:
        """Close the connection."""
        ...


class Lane:
    """Answers the requests of one connection whose heads are known; others go `otherwise`."""

    __slots__ = (
        "_body_seconds",
        "_call",
        "_ended",
        "_gathered",
        "_held",
        "_loop",
        "_owner",
        "_plan",
        "_plans",
        "_reading",
        "_timer",
        "_transport",
        "_turn",
        "_writing",
        "busy",
        "closing",
        "waited_seconds",
    )

    def __init__(
        self, plans: Plans, owner: Owner, transport: asyncio.Transport, body_seconds: float
    ) -> None:
        self._plans = plans
        self._owner = owner
        self._transport = transport
        self._body_seconds = body_seconds
        self._loop = asyncio.get_running_loop()
        self.busy = False
        """Whether what comes is for the lane, wherever a request begins."""
        self.closing = False
        """Whether the connection ends with the answer to the request."""
        self.waited_seconds = 0.0
        """How long it has waited for the body of a request that went `otherwise` then."""
        self._plan: Plan | None = None
        self._call: Pending | asyncio.Task[HttpResponse] | None = None
        """The request that is being answered."""
        self._gathered = bytearray()
        """A request whose body is not complete."""
        self._timer: asyncio.TimerHandle | None = None
        """When that is given up; None where there is no such request."""
        self._held = bytearray()
        """What came too early."""
        self._turn: asyncio.Handle | None = None
        """When that is looked at."""
        self._reading = True
        self._writing = True
        self._ended: asyncio.Future[None] | None = None

    def _settle(self) -> None:
        self.busy = bool(self._held) or not (
            self._call is None and self._timer is None and self._turn is None
        )

    @property
    def is_idle(self) -> bool:
        """Tell whether nothing is to be answered, and no answer on its way."""
        return self._writing and not self.busy

    # --- bytes ---

    def receive(self, data: bytes) -> None:
        """Take bytes, which begin where a request does unless the lane is busy."""
        if self.busy:
            self._receive_more(data)
            return
        if not self._writing:
            self._hold(data)
            return
        head = head_of(data)
        plan = self._plans.get(head) or self._plans.find(head)
        if plan is None or not self._owner.held.admits_short(plan.length):
            self._owner.otherwise(data)
            return
        end = len(head)
        size = end + plan.length
        if len(data) == size:
            self._begin(plan, memoryview(data)[end:])
        elif len(data) < size:
            self._gather(plan, data)
        else:
            self._begin(plan, memoryview(data)[end:size])
            self._hold(memoryview(data)[size:])
            self._go_on()

    def _receive_more(self, data: bytes) -> None:
        if self._timer is None:
            self._hold(data)
            return
        self._gathered += data
        self._count_ahead()
        plan = self._plan
        assert plan is not None
        if len(self._gathered) >= len(head_of(self._gathered)) + plan.length:
            self.receive(self._take_gathered())

    def _gather(self, plan: Plan, data: bytes) -> None:
        self._plan = plan
        self._gathered += data
        self._count_ahead()
        self._timer = self._loop.call_later(self._body_seconds, self.hand_over)
        self._settle()

    def _take_gathered(self) -> bytes:
        assert self._timer is not None
        self._timer.cancel()
        self._timer = None
        self._settle()
        data = bytes(self._gathered)
        self._gathered.clear()
        self._count_ahead()
        return data

    def hand_over(self) -> None:
        """Let a request whose body is not complete go `otherwise`, if there is one."""
        if self._timer is not None:
            left = self._timer.when() - self._loop.time()
            self.waited_seconds = self._body_seconds - max(0.0, left)
            self._owner.otherwise(self._take_gathered())

    # --- what came too early ---

    def _hold(self, data: bytes | memoryview) -> None:
        self._held += data
        self._count_ahead()
        self.busy = True
        if len(self._held) > _HELD_BYTES and self._reading:
            self._reading = False
            self._transport.pause_reading()

    def _count_ahead(self) -> None:
        self._owner.held.set_ahead(len(self._held) + len(self._gathered))

    def _go_on(self) -> None:
        if self._held and self._call is None and self._turn is None and self._writing:
            # Not now, so that other connections have their turn.
            self._turn = self._loop.call_soon(self._take_turn)
        self._settle()

    def _take_turn(self) -> None:
        self._turn = None
        if not self._writing or self._transport.is_closing():
            return
        # The first request alone: what is behind it is not copied for each one.
        held, self._held = self._held, bytearray()
        head = head_of(held)
        plan = self._plans.get(head) or self._plans.find(head)
        data = bytes(held if plan is None else held[: len(head) + plan.length])
        del held[: len(data)]
        if not self._reading and len(held) <= _HELD_BYTES:
            # Before the bytes are handed on: whoever takes them may pause reading in its turn.
            self._reading = True
            self._transport.resume_reading()
        self._settle()
        self.receive(data)
        self._held = held
        self._count_ahead()
        self._go_on()

    def pause(self) -> None:
        """Begin nothing more: answers do not leave."""
        self._writing = False

    def resume(self) -> None:
        """Go on: answers leave again."""
        self._writing = True
        if self._call is None:
            self._end()
        self._go_on()

    # --- requests ---

    def _begin(self, plan: Plan, body: memoryview) -> None:
        try:
            begun = plan.begin(body, self._done)
        except Exception as error:
            self._fail(plan, error)
            return
        if type(begun) is HttpResponse:
            self._answer(plan, begun)
        else:
            self._wait(plan, begun)  # type: ignore[arg-type]

    def _wait(self, plan: Plan, call: "Pending | asyncio.Task[HttpResponse]") -> None:
        self._plan = plan
        self._call = call
        self.busy = True
        self._owner.held.begin_short(plan.length)

    def _done(self, result: HttpResponse | BaseException) -> None:
        """Take the answer to the request that waits."""
        plan = self._plan
        assert plan is not None
        self._call = None
        self._owner.held.end_request()
        if self._transport.is_closing():
            self._end()
            return
        if type(result) is HttpResponse:
            self._answer(plan, result)
        else:
            self._fail(plan, result)  # type: ignore[arg-type]
        if self._call is None and not self._held:
            self.busy = False
        else:
            self._go_on()

    def _fail(self, plan: Plan, error: BaseException) -> None:
        if isinstance(error, Exception):
            self._answer(plan, translate(error, method=plan.method, path=plan.path))
        else:
            # It was cancelled: aiohttp as well closes a connection whose handler is.
            self._owner.force_close()
            self._end()

    def _answer(self, plan: Plan, answer: HttpResponse) -> None:
        finishing = plan.finish(answer) if plan.finish is not None else None
        if finishing is None:
            self._write(plan, answer)
        else:
            self._wait(plan, finishing)
            finishing.add_done_callback(self._finished)

    def _finished(self, finishing: "asyncio.Task[HttpResponse]") -> None:
        if self._call is not finishing:
            return
        assert self._plan is not None
        self._call = None
        self._owner.held.end_request()
        if self._transport.is_closing():
            self._end()
            return
        try:
            self._write(self._plan, finishing.result())
        except (Exception, asyncio.CancelledError) as error:
            self._fail(self._plan, error)
        self._go_on()

    # --- answers ---

    def _write(self, plan: Plan, answer: HttpResponse) -> None:
        size = answer.size
        if size > JOINED_BYTES:
            answer = self._owner.held.begin_answer(answer, size, plan.method, plan.path)
            size = answer.size
        headers = tuple(answer.headers.items()) if answer.headers else ()
        head = _head(answer.status, answer.content_type, headers, size, int(time.time()))
        if size <= JOINED_BYTES:
            self._transport.write(b"".join((head, *answer.parts)))
        else:
            self._transport.write(head)
            for part in answer.parts:
                self._transport.write(part)
            self._owner.held.end_answer()
        self._owner.answered()
        if self.closing:
            self._transport.close()
            if self._writing:
                self._end()

    # --- the end ---

    def cancel(self) -> None:
        """Forget all that is not answered: nobody wants it."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        for later in (self._timer, self._turn):
            if later is not None:
                later.cancel()
        self._timer = self._turn = None
        self._gathered.clear()
        self._held.clear()
        self._settle()
        self._end()

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def end(self, seconds: float | None) -> None:
        """Wait so long until the request that is being answered has its answer, then forget it."""
        if self._call is not None or not self._writing:
            self._ended = self._loop.create_future()
            await asyncio.wait([self._ended], timeout=seconds)
        self.cancel()


def head_of(data: bytes | bytearray) -> bytes:
    """Return request line and headers with the empty line behind them; empty if it is not there."""
    end = data.find(_END)
    return bytes(data[: end + len(_END)]) if end >= 0 else b""


@lru_cache(maxsize=256)
def _head(
    status: HTTPStatus,
    content_type: str,
    headers: Sequence[tuple[str, str]],
    size: int,
    date_seconds: int,
) -> bytes:
    """Write status line and headers, as aiohttp writes them and in its order."""
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {content_type}",
        f"Server: {NAME}",
        *[f"{name}: {value}" for name, value in headers],
        f"Content-Length: {size}",
        f"Date: {formatdate(date_seconds, usegmt=True)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode()
