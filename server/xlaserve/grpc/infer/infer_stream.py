"""ModelStreamInfer: the requests of one stream, and their answers in the order of the requests.

Those of models that give many answers are sent as they come, beside others.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from functools import partial

from grpclib import GRPCError
from grpclib.const import Status

from xlaserve.concurrency.host import HostThreads
from xlaserve.errors import BudgetExhausted, InvalidRequest, ShuttingDown
from xlaserve.errors.panics import ENDS
from xlaserve.grpc.infer.infer_codec import DecodedInfer, InferCodec
from xlaserve.grpc.infer.infer_fast_path import refusal_for
from xlaserve.grpc.infer.long_messages import LONG_BYTES, is_read_quickly
from xlaserve.grpc.infer.stream_answers import StreamAnswers
from xlaserve.grpc.runner import RpcStream
from xlaserve.serving.call import Call
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferRequest, InferResponse
from xlaserve.serving.made_arrays import made_bytes, reserve_made

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"

_EMPTY_FINAL = "triton_enable_empty_final_response"
"""Request parameter that asks for a final answer without outputs."""
_ERRORS_END = "triton_grpc_error"
"""The header of a stream whose first error is its status."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Memory and count limits of streams."""

    max_streams: int
    """Limit of open streams."""
    max_requests: int
    """Limit of requests in flight on one stream; further ones are not read."""
    max_bytes: int
    """Bytes of answers of one of them that may wait for its client: from then on no request is
    read, and a model that answers many times pauses."""


class InferStreams:
    """Answers the streams of all connections."""

    def __init__(
        self,
        engine: Engine,
        gates: Gates,
        codec: InferCodec,
        limits: StreamLimits,
        threads: HostThreads,
        *,
        answers: StreamAnswers | None = None,
    ) -> None:
        self.engine = engine
        self.gates = gates
        self.codec = codec
        self.limits = limits
        self.threads = threads
        self.answers = answers or StreamAnswers(codec)
        self._open: set[InferStream] = set()

    async def run(self, stream: RpcStream) -> None:
        """Answer the requests of a stream until its client has sent the last one."""
        if len(self._open) >= self.limits.max_streams:
            text = f"{len(self._open)} inference streams are already open (max_infer_streams)"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, text)
        answering = InferStream(self, stream)
        self._open.add(answering)
        try:
            await answering.run()
        finally:
            self._open.discard(answering)

    def close(self) -> None:
        """Read no more requests; each stream ends once those in flight are answered."""
        for stream in self._open:
            stream.close()


class StreamedInfer(InferCall):
    """One request of a stream; its answers wait for those of earlier requests."""

    takes_many = True
    method = METHOD
    wants_empty_final = False
    is_decoupled = False
    """Whether its answers wait for no other request."""
    failure: tuple[Status, str | None] | None = None
    """The status that ends the stream instead of its answers."""

    def __init__(self, stream: "InferStream", whole: Call, message_bytes: int) -> None:
        """`whole` is the call of the stream, with its client."""
        self._stream = stream
        self.headers, self.peer, self.principal = whole.headers, whole.peer, whole.principal
        self.deadline = whole.deadline
        self.message_bytes = message_bytes
        """Bytes that the ledger counts for its message."""
        self.answers: deque[tuple[bytes, int]] = deque()
        """Unsent messages, each with its size on the ledger."""
        self.answer_bytes = 0
        """Bytes of unsent messages."""

    def expire_in_time(self) -> None:
        """Do nothing: the stream expires as a whole, and cancels its requests."""

    @property
    def is_writable(self) -> bool:
        """Tell whether the client may be sent another answer besides a queued one."""
        return self._stream.takes_answer_of(self)

    def write(self, response: InferResponse, *, last: bool) -> None:
        """Send an answer in its turn."""
        if last and not response.outputs and not self.wants_empty_final:
            self._stream.wake()
            return
        try:
            message = self._stream.answers.write(response, typed=self.typed, last=last)
        except ENDS:
            raise
        except BaseException as error:
            self._refuse_instead(error)
            return
        if not self._stream.has_sent(self, message, last=last):
            if not self._stream.reserve(len(message)):
                self._refuse_instead(self._stream.refusal(len(message)))
                return
            self._enqueue(message, len(message))
        if self.record is not None:
            self.record.sent(len(message))

    def refuse(self, error: BaseException) -> None:
        """Send an error in its turn: in the stream, or as its end."""
        refusal = refusal_for(error)
        if self._stream.errors_end:
            self.failure = refusal.status, refusal.message
        else:
            # Small, and sent even without memory: it may report that memory is exhausted.
            self._enqueue(self._stream.answers.refuse(self, refusal), 0)
        self._stream.wake()

    def _refuse_instead(self, error: BaseException) -> None:
        if self.has_ended:
            self.outcome = error
            self.refuse(error)
        else:
            self.fail(error)

    def _enqueue(self, message: bytes, counted: int) -> None:
        self.answers.append((message, counted))
        self.answer_bytes += len(message)
        self._stream.wake()


class InferStream:
    """One stream: a task reads and begins requests, another sends the answers."""

    def __init__(self, streams: InferStreams, stream: RpcStream) -> None:
        self.answers = streams.answers
        self.errors_end = self.answers.is_bare or stream.call.headers.get(_ERRORS_END) == "true"
        """Whether the first error is the status of the stream."""
        self._engine = streams.engine
        self._gates = streams.gates
        self._decode = streams.codec.decode
        self._recognise = streams.codec.recognise
        self._threads = streams.threads
        self._limits = streams.limits
        self._stream = stream
        self._calls: deque[StreamedInfer] = deque()
        """Requests whose last answer was not sent yet, in their order."""
        self._decoupled: dict[StreamedInfer, None] = {}
        """Decoupled requests, in rotation, whose answers wait for no other request."""
        self._answer_bytes = 0
        """Bytes of unsent answers of all requests."""
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_sending = False
        """Whether the task that sends is in the middle of an answer."""
        self._reading: asyncio.Task[None] | None = None
        self._is_read = False
        """Whether no more requests will be read."""
        self._is_closing = False
        self._failure: tuple[Status, str | None] | None = None
        """Why a message could not be read."""

    async def run(self) -> None:
        """Return once all requests are answered; raises GRPCError for an unreadable one."""
        self._reading = asyncio.ensure_future(self._read_all())
        try:
            await self._send_all()
        finally:
            self._reading.cancel()
            calls = [*self._calls, *self._decoupled]
            self._calls.clear()
            self._decoupled.clear()
            for call in calls:
                call.cancel("the stream has ended")
            await asyncio.wait([self._reading])
        if self._failure is not None:
            raise GRPCError(*self._failure)
        if self._is_closing:
            raise ShuttingDown

    def close(self) -> None:
        """Read no more requests, and end once those in flight are answered.

        A client that has sent its last one is refused nothing: its stream ends as it would have.
        """
        self._is_closing = not self._is_read
        assert self._reading is not None
        self._reading.cancel()

    # --- requests ---

    async def _read_all(self) -> None:
        try:
            while True:
                while self._is_full:
                    self._has_room.clear()
                    await self._has_room.wait()
                message = await self._stream.recv_message()
                if message is None:
                    return
                if (await self._begin(message)).has_ended:
                    # It took the time of the event loop: others have their turn.
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            return  # by `run` or `close`; a task that is cancelled would keep the error, see below
        except ENDS:
            raise
        except BaseException as error:
            # Not the error itself: it holds the frames that hold this stream.
            refusal = refusal_for(error)
            self._failure = refusal.status, refusal.message
        finally:
            self._is_read = True
            self.wake()

    @property
    def _is_full(self) -> bool:
        return (
            len(self._calls) + len(self._decoupled) >= self._limits.max_requests
            or self._answer_bytes >= self._limits.max_bytes
        )

    async def _begin(self, message: bytes) -> StreamedInfer:
        """Begin a request; raises where its message cannot be read."""
        # One that is like another is views of the message, which is counted.
        decoded: InferRequest | DecodedInfer
        known = self._recognise(message)
        is_long = known is None and len(message) > LONG_BYTES and not is_read_quickly(message)
        if is_long:
            decoded = await self._threads.run(partial(self._decode, message))
        else:
            decoded = known or self._decode(message)
        call = StreamedInfer(self, self._stream.call, self._stream.accepted.keep())
        call.id = decoded.id
        self._calls.append(call)
        try:
            self._gates.admit(call)
            if call.record is not None:
                call.record.received(len(message))
            if isinstance(decoded, InferRequest):
                request = decoded
            else:
                request = await self._read(call, decoded, is_long=is_long)
        except asyncio.CancelledError:
            call.fail(ShuttingDown())  # unless the stream has ended
            raise
        except ENDS:
            raise
        except BaseException as error:
            call.fail(error)
            return call
        call.wants_empty_final = request.parameters.get(_EMPTY_FINAL) is True
        self._engine.begin(call, request)
        if not call.has_ended and call.is_found and call.instance.info.is_decoupled:
            call.is_decoupled = True
            self._calls.remove(call)
            self._decoupled[call] = None
        return call

    async def _read(
        self, call: StreamedInfer, decoded: DecodedInfer, *, is_long: bool
    ) -> InferRequest:
        """Read the tensors, in a thread where that may take long, and count what is made."""
        size = decoded.elements_bytes
        reserve_made(call, size)
        try:
            if size or is_long:
                request = await self._threads.run(decoded.request)
            else:
                request = decoded.request()
        except InvalidRequest:
            # That there is no such model matters more; and the request is counted as its failure.
            self._engine.find(call, decoded.model_name, decoded.model_version)
            raise
        if not size:
            reserve_made(call, made_bytes(request.inputs))
        return request

    # --- answers ---

    def takes_answer_of(self, call: StreamedInfer) -> bool:
        """Tell whether a request may be answered once more."""
        if call.is_decoupled:
            return self._answer_bytes < self._limits.max_bytes
        if self._calls and self._calls[0] is call:
            return call.answer_bytes < self._limits.max_bytes
        return not call.answers

    # Most answers come when nothing is to be sent before them. The fast path sends these without
    # waking the task that sends, nor counting what does not wait; it only accepts.

    def has_sent(self, call: StreamedInfer, message: bytes, *, last: bool) -> bool:
        """Send an answer at once if it is its turn; false where it has to wait.

        With the last one the request is forgotten.
        """
        whole, calls = self._stream, self._calls
        if (
            self._is_sending
            or call.answers
            or not (call.is_decoupled or (calls and calls[0] is call))
            or whole.call.record is not None  # notes all that `send_message` sends
            or not whole.accepted.send_now(message)
        ):
            return False
        if last:
            if call.is_decoupled:
                self._decoupled.pop(call, None)
            else:
                calls.popleft()
            self._forget(call)
            if calls or self._is_read:
                self.wake()  # the next one may be answered, or this was the end
        return True

    def reserve(self, count: int) -> bool:
        """Charge bytes of a queued answer; false without memory."""
        if not self._stream.accepted.reserve(count):
            return False
        self._answer_bytes += count
        return True

    def refusal(self, count: int) -> BudgetExhausted:
        """Return the error of an answer without memory."""
        return self._stream.accepted.account.refusal("the answer", count)

    def wake(self) -> None:
        """Have answers sent."""
        self._changed.set()

    async def _send_all(self) -> None:
        while self._is_in_use:
            self._changed.clear()
            for call in tuple(self._decoupled):
                if await self._is_answered(call):
                    del self._decoupled[call]
                    self._forget(call)
            while self._calls and await self._is_answered(self._calls[0]):
                self._forget(self._calls.popleft())
            if not self._changed.is_set() and self._is_in_use:
                await self._changed.wait()

    @property
    def _is_in_use(self) -> bool:
        return bool(self._calls or self._decoupled or not self._is_read)

    def _forget(self, answered: StreamedInfer) -> None:
        self._stream.accepted.release(answered.message_bytes)
        self._has_room.set()

    async def _is_answered(self, call: StreamedInfer) -> bool:
        """Send the answers that a request has by now; tell whether the last one was sent."""
        for _ in range(len(call.answers)):
            message, counted = call.answers.popleft()
            # The connection counts what waits from here on.
            self._stream.accepted.release(counted)
            self._is_sending = True
            await self._stream.send_message(message)
            self._answer_bytes -= counted
            call.answer_bytes -= len(message)
            # What is resumed may answer, and finds this task in the middle of its look at all.
            self._resume(call)
            self._is_sending = False
        if call.failure is not None:
            raise GRPCError(*call.failure)
        return call.has_ended and not call.answers

    def _resume(self, sent: StreamedInfer) -> None:
        """Resume requests after sent answers: a stream has one budget."""
        self._has_room.set()
        if not sent.is_decoupled:
            sent.resume()
        if self._answer_bytes < self._limits.max_bytes:
            for call in tuple(self._decoupled):
                call.resume()
