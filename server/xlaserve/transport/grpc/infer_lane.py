"""ModelInfer without grpclib: no task, no message objects, and no wait where none is needed."""

import asyncio
from collections.abc import Callable

from grpclib import GRPCError
from grpclib.const import Status
from grpclib.metadata import encode_grpc_message

from xlaserve.core.serving.engine import Engine
from xlaserve.core.serving.inference import InferRequest, InferResponse, Pending
from xlaserve.errors import InvalidRequest
from xlaserve.transport.grpc.codec import refusal_of
from xlaserve.transport.grpc.decoder import TooManyFields
from xlaserve.transport.grpc.edge import translate
from xlaserve.transport.grpc.grpclib_stream import NO_ROOM_FOR_ANSWERS
from xlaserve.transport.grpc.infer_codec import DecodedInfer, InferCodec, tensor_offset
from xlaserve.transport.grpc.wire import MalformedMessage
from xlaserve.transport.http2.headers import encode_fields
from xlaserve.transport.http2.messages import PREFIX, PREFIX_BYTES
from xlaserve.transport.http2.stream import Buffer, Route, ServerStream

METHOD = "/inference.GRPCInferenceService/ModelInfer"
_MESSAGE = "ModelInferRequest"

_RESPONSE = ((":status", "200"), ("content-type", "application/grpc+proto"))
_HEAD = encode_fields(_RESPONSE)
_OK = encode_fields([("grpc-status", "0")])


class InferLane:
    """Answers ModelInfer of one connection; what is not ordinary goes `otherwise`."""

    message_first = True

    def __init__(
        self,
        engine: Engine,
        codec: InferCodec,
        otherwise: Route,
        *,
        decode: Callable[[Buffer], DecodedInfer] | None = None,
        refusal: "Callable[[BaseException], GRPCError] | None" = None,
    ) -> None:
        """`decode` and `refusal` are the codec's and the usual one, unless they are given."""
        self._engine = engine
        self._decode = decode or codec.decode
        self._encode = codec.encode
        self._encode_typed = codec.encode_typed
        self._otherwise = otherwise
        self._refusal = refusal or refusal_for
        self.place = tensor_offset

    def begin(self, stream: ServerStream) -> None:
        """Answer at once where the model is quick, else when its batch was executed."""
        message = stream.message
        if message is None or stream.compressed:
            self._otherwise.begin(stream)
            return
        stream.message = None
        call = _Call(self, stream)
        try:
            decoded = self._decode(message)
            call.typed = typed = decoded.typed
            begun = self._engine.begin(self._read(decoded), call)
            if type(begun) is InferResponse:
                self.answer(stream, begun, typed=typed)
                return
        except Exception as error:
            self.refuse(stream, error)
            return
        call.pending = begun  # type: ignore[assignment]
        stream.call = call

    def _read(self, decoded: DecodedInfer) -> InferRequest:
        try:
            return decoded.request()
        except InvalidRequest:
            # That there is no such model matters more; and the request is counted as its failure.
            with self._engine.require(decoded.model_name, decoded.model_version):
                raise

    def finish(self, stream: ServerStream, response: InferResponse, *, typed: bool) -> None:
        """Send a response that was waited for, or what is wrong with it."""
        try:
            self.answer(stream, response, typed=typed)
        except Exception as error:
            self.refuse(stream, error)

    def answer(self, stream: ServerStream, response: InferResponse, *, typed: bool) -> None:
        """Send a response; raises what hinders it from being written."""
        parts, size = self._encode_typed(response) if typed else self._encode(response)
        parts.insert(0, PREFIX.pack(0, size))
        if not stream.output.answer(stream, _HEAD, parts, size + PREFIX_BYTES, _OK):
            self.refuse(stream, GRPCError(Status.RESOURCE_EXHAUSTED, NO_ROOM_FOR_ANSWERS))

    def refuse(self, stream: ServerStream, error: BaseException) -> None:
        """Send the status that the table has for an error."""
        refusal = self._refusal(error)
        fields = [*_RESPONSE, ("grpc-status", str(refusal.status.value))]
        if refusal.message:
            fields.append(("grpc-message", encode_grpc_message(refusal.message)))
        stream.send_headers(encode_fields(fields), end=True)


def refusal_for(error: BaseException) -> GRPCError:
    """Return the status and the text for whatever has kept a request from an answer."""
    if isinstance(error, MalformedMessage | TooManyFields):
        return refusal_of(error, _MESSAGE)
    if isinstance(error, asyncio.CancelledError):
        return GRPCError(Status.CANCELLED, "the request was cancelled")
    assert isinstance(error, Exception)
    translated = translate(METHOD, error)
    if isinstance(translated, GRPCError):
        return translated
    return GRPCError(Status.INTERNAL, "internal error")


class _Call:
    """A request that waits for its answer."""

    __slots__ = ("_lane", "_stream", "pending", "timer", "typed")

    waits = False

    def __init__(self, lane: InferLane, stream: ServerStream) -> None:
        self._lane = lane
        self._stream = stream
        self.pending: Pending | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.typed = False
        """Whether the inputs came as typed contents."""

    def __call__(self, result: InferResponse | BaseException) -> None:
        """Take the answer."""
        self._stream.call = None
        if self.timer is not None:
            self.timer.cancel()
        if type(result) is InferResponse:
            self._lane.finish(self._stream, result, typed=self.typed)
        else:
            self._lane.refuse(self._stream, result)  # type: ignore[arg-type]

    def cancel(self, reason: str) -> None:
        """Leave the queue: nobody wants the answer."""
        if self.timer is not None:
            self.timer.cancel()
        if self.pending is not None:
            self.pending.cancel()

    def expire(self) -> None:
        """Refuse the request, whose time is over."""
        self.cancel("the deadline has passed")
        self._stream.call = None
        self._lane.refuse(self._stream, GRPCError(Status.DEADLINE_EXCEEDED))


class TimedLane:
    """The lane of requests with a deadline, which each of them says itself."""

    message_first = True

    def __init__(self, lane: Route) -> None:
        self._lane = lane
        self.place = lane.place

    def begin(self, stream: ServerStream) -> None:
        """Answer as the lane does, if there is time."""
        self._lane.begin(stream)
        call, seconds = stream.call, stream.head.timeout
        if seconds is not None and isinstance(call, _Call):
            loop = asyncio.get_running_loop()
            call.timer = loop.call_later(seconds, call.expire)
