"""ModelStreamInfer: many requests on one stream, answered in request order.

Answers of decoupled models are sent as they are produced, interleaved with others.
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
"""Request parameter that asks for a final response without outputs."""
_ERRORS_END = "triton_grpc_error"
"""Stream header that makes the first error end the stream with its gRPC status."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Limits for streams."""

    max_streams: int
    """Maximum number of open streams."""
    max_requests: int
    """Maximum requests in flight per stream; reading pauses when it is reached."""
    max_bytes: int
    """Bytes of unsent responses per stream at which reading pauses, and so do decoupled models."""


class InferStreams:
    """Runs the streams of all connections."""

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
        """Answer all requests of a stream; raise RESOURCE_EXHAUSTED if too many are open."""
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
        """Drain all streams: stop reading; each ends when its requests in flight are answered."""
        for stream in self._open:
            stream.close()


class StreamedInfer(InferCall):
    """One request of a stream; its responses are sent after those of earlier requests."""

    takes_many = True
    method = METHOD
    wants_empty_final = False
    is_decoupled = False
    """Whether responses are sent without waiting for earlier requests."""
    failure: tuple[Status, str | None] | None = None
    """The status that ends the stream when it is this request's turn, or None."""

    def __init__(self, stream: "InferStream", whole: Call, message_bytes: int) -> None:
        """`whole` is the call of the stream; it has the headers, peer, principal and deadline."""
        self._stream = stream
        self.headers, self.peer, self.principal = whole.headers, whole.peer, whole.principal
        self.deadline = whole.deadline
        self.message_bytes = message_bytes
        """Bytes reserved in the ledger for the request message."""
        self.answers: deque[tuple[bytes, int]] = deque()
        """Queued responses, each with its bytes reserved in the ledger."""
        self.answer_bytes = 0
        """Total bytes of the queued responses."""

    def expire_in_time(self) -> None:
        """Do nothing: the stream has the deadline, and cancels its requests when it expires."""

    @property
    def is_writable(self) -> bool:
        """Tell whether the model may produce another response now."""
        return self._stream.takes_answer_of(self)

    def write(self, response: InferResponse, *, last: bool) -> None:
        """Send a response, or queue it until earlier requests are answered."""
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
        """Queue an error, as a message or as the status that ends the stream."""
        refusal = refusal_for(error)
        if self._stream.errors_end:
            self.failure = refusal.status, refusal.message
        else:
            # Reserve no memory: the message is small, and may report that memory is exhausted.
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
    """One stream: one task reads and starts requests, another sends queued responses."""

    def __init__(self, streams: InferStreams, stream: RpcStream) -> None:
        self.answers = streams.answers
        self.errors_end = self.answers.is_bare or stream.call.headers.get(_ERRORS_END) == "true"
        """Whether the first error ends the stream with its gRPC status."""
        self._engine = streams.engine
        self._gates = streams.gates
        self._decode = streams.codec.decode
        self._recognise = streams.codec.recognise
        self._threads = streams.threads
        self._limits = streams.limits
        self._stream = stream
        self._calls: deque[StreamedInfer] = deque()
        """Unfinished non-decoupled requests, in order; only the first may send responses."""
        self._decoupled: dict[StreamedInfer, None] = {}
        """Unfinished decoupled requests; all of them may send responses."""
        self._answer_bytes = 0
        """Total bytes of queued responses."""
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_sending = False
        """Whether the sending task is sending a response at the moment."""
        self._reading: asyncio.Task[None] | None = None
        self._is_read = False
        """Whether reading has ended."""
        self._is_closing = False
        self._failure: tuple[Status, str | None] | None = None
        """The status for a request message that could not be read, or None."""

    async def run(self) -> None:
        """Run until all requests are answered; raise GRPCError if a message cannot be read."""
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
        """Stop reading; the stream ends when its requests in flight are answered.

        It ends with an error only if the client might have sent more requests.
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
                    # The request ran on the event loop; let other tasks run.
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            return  # suppressed: `run` or `close` cancelled the task, which would keep the error
        except ENDS:
            raise
        except BaseException as error:
            # Keep the status, not the exception, whose frames hold this stream (reference cycle).
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
        """Decode and start a request; raise if its message is malformed."""
        # With a cached layout, the request consists of views of the message, which is already
        # accounted for.
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
            call.fail(ShuttingDown())  # has no effect if the call was already cancelled
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
        """Decode the tensors, in a thread if they are long, and reserve memory for new arrays."""
        size = decoded.elements_bytes
        reserve_made(call, size)
        try:
            if size or is_long:
                request = await self._threads.run(decoded.request)
            else:
                request = decoded.request()
        except InvalidRequest:
            # If the model does not exist, `find` raises that error; otherwise it attributes this
            # one to the model.
            self._engine.find(call, decoded.model_name, decoded.model_version)
            raise
        if not size:
            reserve_made(call, made_bytes(request.inputs))
        return request

    # --- responses ---

    def takes_answer_of(self, call: StreamedInfer) -> bool:
        """Tell whether a request may produce another response now (backpressure)."""
        if call.is_decoupled:
            return self._answer_bytes < self._limits.max_bytes
        if self._calls and self._calls[0] is call:
            return call.answer_bytes < self._limits.max_bytes
        return not call.answers

    # Fast path: most responses can be sent immediately, without waking the sending task and without
    # reserving memory.

    def has_sent(self, call: StreamedInfer, message: bytes, *, last: bool) -> bool:
        """Send a response immediately; false if it has to be queued after others.

        After the last response, the request is removed.
        """
        whole, calls = self._stream, self._calls
        if (
            self._is_sending
            or call.answers
            or not (call.is_decoupled or (calls and calls[0] is call))
            or whole.call.record is not None  # `send_message` updates the record
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
                self.wake()  # to send the responses of the next request, or to end the stream
        return True

    def reserve(self, count: int) -> bool:
        """Reserve memory for a response to be queued; false if there is none."""
        if not self._stream.accepted.reserve(count):
            return False
        self._answer_bytes += count
        return True

    def refusal(self, count: int) -> BudgetExhausted:
        """Return the error for a response of `count` bytes that does not fit into memory."""
        return self._stream.accepted.account.refusal("the answer", count)

    def wake(self) -> None:
        """Wake the sending task."""
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
        """Send the queued responses of a request; return whether its last one was sent."""
        for _ in range(len(call.answers)):
            message, counted = call.answers.popleft()
            # From here on, the connection's sender accounts for the bytes.
            self._stream.accepted.release(counted)
            self._is_sending = True
            await self._stream.send_message(message)
            self._answer_bytes -= counted
            call.answer_bytes -= len(message)
            # Resume while `_is_sending` is set: a resumed model may answer immediately, and its
            # answer must be queued because this loop is still running.
            self._resume(call)
            self._is_sending = False
        if call.failure is not None:
            raise GRPCError(*call.failure)
        return call.has_ended and not call.answers

    def _resume(self, sent: StreamedInfer) -> None:
        """Resume paused requests after a response was sent; decoupled ones share one byte limit."""
        self._has_room.set()
        if not sent.is_decoupled:
            sent.resume()
        if self._answer_bytes < self._limits.max_bytes:
            for call in tuple(self._decoupled):
                call.resume()
