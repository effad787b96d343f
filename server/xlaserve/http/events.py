"""Server-sent events: the responses to one inference, each sent as it arrives (HTML, section 9.2).

    data: {"model_name":...,"outputs":[...],"parameters":{"triton_final_response":false}}

    event: error
    data: {"error":"..."}

Each answer is one event; a parameter marks the last one, as in ModelStreamInfer. An error before
the first response becomes an ordinary HTTP response; a later error becomes the last event.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import NamedTuple, TypeAlias

import msgspec

from xlaserve.errors import BudgetExhausted, InvalidParameter
from xlaserve.errors.panics import ENDS
from xlaserve.http.accept import preferred
from xlaserve.http.edge import translate
from xlaserve.http.messages import BINARY_TYPE, JOINED_BYTES, JSON_TYPE, HttpResponse
from xlaserve.http.v2.infer_request import BINARY_DATA, BINARY_OUTPUT
from xlaserve.http.v2.infer_response import output_bytes
from xlaserve.serving.call import Headers, Peer
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import DetailedResponse, InferRequest, InferResponse

EVENT_STREAM_TYPE = "text/event-stream"

FINAL_RESPONSE = "triton_final_response"
"""The response parameter that tells whether this response is the last one."""

_FINAL_MARK = b'"parameters":{"%b":%%b}' % FINAL_RESPONSE.encode()

Encode: TypeAlias = Callable[[InferResponse], Awaitable[HttpResponse]]
"""Serializes a response as JSON, in a thread if the response is large."""


def wants_events(headers: Headers) -> bool:
    """Tell whether the Accept header prefers events to a single response."""
    accept = headers.get("accept") or ""
    return preferred(accept, (JSON_TYPE, BINARY_TYPE, EVENT_STREAM_TYPE)) == EVENT_STREAM_TYPE


def refuse_binary(request: InferRequest) -> None:
    """Raise InvalidParameter if binary outputs are requested, since events are text."""
    for parameters, name in (
        (request.parameters, BINARY_OUTPUT),
        *((output.parameters, BINARY_DATA) for output in request.outputs),
    ):
        if parameters.get(name) is True:
            expected = f"false, since {EVENT_STREAM_TYPE} cannot contain binary data"
            raise InvalidParameter(name, expected, "true")


class _Answer(NamedTuple):
    response: InferResponse
    last: bool
    size: int
    """Bytes charged until the response is sent."""


class EventCall(InferCall):
    """An inference answered by events; it queues the responses that were not sent yet."""

    takes_many = True

    def __init__(
        self, names: Mapping[str, str], headers: Headers, peer: Peer, max_bytes: int
    ) -> None:
        """`names` are path parameters. The model pauses above `max_bytes` of unsent responses."""
        self.model = names.get("model", "")
        self.version = names.get("version", "")
        self.headers = headers
        self.peer = peer
        self.grow: Callable[[int, str], None] = lambda count, what: None
        """Charges, or with a negative count releases, queued responses; raises BudgetExhausted."""
        self._max_bytes = max_bytes
        self._waiting: deque[_Answer | BaseException] = deque()
        self._waiting_bytes = 0
        self._changed = asyncio.Event()
        self.hold(self._tell)

    def _tell(self) -> None:
        self._changed.set()

    # --- For the engine ---

    @property
    def is_writable(self) -> bool:
        """Tell whether another response may be queued (backpressure)."""
        return self._waiting_bytes < self._max_bytes

    def write(self, response: InferResponse, *, last: bool) -> None:
        """Queue a response to be sent."""
        size = output_bytes(response)
        try:
            self.grow(size, "the answer")
        except BudgetExhausted as error:
            # The last response has already ended the call.
            self.outcome = error
            (self.refuse if self.has_ended else self.fail)(error)
            return
        # The sender reports the end of this call: `events`, or the gates of the request.
        self.notifies_later = last and self.parent is None
        self._waiting.append(_Answer(response, last, size))
        self._waiting_bytes += size
        self._tell()

    def refuse(self, error: BaseException) -> None:
        """Queue an error to be sent after the responses."""
        self._waiting.append(error)
        self._tell()

    # --- For the sender ---

    async def answers(self) -> AsyncGenerator[tuple[InferResponse, bool], None]:
        """Yield each response as it arrives, and whether it is the last one.

        A response counts as sent when the next one is requested. Raises the error that ends the
        call. Closing the generator early cancels the call.
        """
        try:
            while True:
                waiting = await self._next()
                if isinstance(waiting, BaseException):
                    raise waiting
                yield waiting.response, waiting.last
                if waiting.last:
                    return
                self._sent(waiting)
        finally:
            self._leave()

    async def _next(self) -> _Answer | BaseException:
        while (waiting := self._take()) is None:
            self._changed.clear()
            await self._changed.wait()
        return waiting

    def _take(self) -> _Answer | BaseException | None:
        """Return the next queued response or error, or None."""
        if self._waiting:
            return self._waiting.popleft()
        return asyncio.CancelledError("the call was cancelled") if self.has_ended else None

    def _sent(self, answer: _Answer) -> None:
        """Release a response's charge, since the next one was requested."""
        self._waiting_bytes -= answer.size
        self.grow(-answer.size, "the answer")
        self.resume()

    @contextmanager
    def holding(self, event: bytes) -> Iterator[None]:
        """Charge an event while it is being sent; raises BudgetExhausted."""
        size = len(event)
        if size <= JOINED_BYTES:
            yield
            return
        self.grow(size, "the answer")
        try:
            yield
        finally:
            self.grow(-size, "the answer")

    def _leave(self) -> None:
        if not self.has_ended:
            self.cancel("the client disconnected")

    @staticmethod
    async def merged(
        calls: "Sequence[EventCall]",
    ) -> AsyncGenerator[tuple[int, InferResponse, bool], None]:
        """Yield the responses to several calls as they arrive, with the index of their call.

        Calls with queued responses take turns. Raises the error of the first call that fails.
        Closing the generator early, or such an error, cancels the remaining calls.
        """
        changed = asyncio.Event()
        going = dict(enumerate(calls))
        for call in calls:
            call._changed = changed
        try:
            while going:
                changed.clear()
                for index, call in tuple(going.items()):
                    waiting = call._take()
                    if waiting is None:
                        continue
                    changed.set()  # more responses may be queued
                    if isinstance(waiting, BaseException):
                        raise waiting
                    if waiting.last:
                        del going[index]
                    yield index, waiting.response, waiting.last
                    if not waiting.last:
                        call._sent(waiting)
                if going:
                    await changed.wait()
        finally:
            for call in calls:
                call._leave()


async def events(
    call: EventCall, encode: Encode, method: str, path: str
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a call, each after the previous one was sent.

    Raises the error of a call that fails before its first response, so that the HTTP response has
    the status of the error.
    """
    has_begun = False
    try:
        async with aclosing(call.answers()) as answers:
            async for response, last in answers:
                event = await _event(response, encode, last=last)
                with call.holding(event):
                    has_begun = True
                    if last:
                        call.end()
                    yield event
    except ENDS:
        raise
    except BaseException as error:
        if not has_begun or isinstance(error, ConnectionError):
            raise
        call.end(error)
        answer = translate(error, method=method, path=path)
        yield b"event: error\ndata: %b\n\n" % b"".join(answer.parts)


async def _event(response: InferResponse, encode: Encode, *, last: bool) -> bytes:
    """Serialize a response as an event; its JSON contains no line break."""
    if isinstance(response, DetailedResponse):
        parameters = {**response.parameters, FINAL_RESPONSE: last}
        answer = await encode(msgspec.structs.replace(response, parameters=parameters))
        return b"".join((b"data: ", *answer.parts, b"\n\n"))
    *parts, end = (await encode(response)).parts
    mark = _FINAL_MARK % (b"true" if last else b"false")
    return b"".join((b"data: ", *parts, memoryview(end)[:-1], b",", mark, b"}\n\n"))
