"""The fast path of ModelInfer: no grpclib, no task, no message objects."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import TypeAlias

from grpclib import GRPCError
from grpclib.const import Status
from grpclib.metadata import encode_grpc_message

from xlaserve.errors import InvalidRequest
from xlaserve.errors.message import MalformedMessage, TooManyFields
from xlaserve.errors.panics import ENDS
from xlaserve.grpc.compression import (
    ACCEPTED,
    COMPRESSED_TIMES,
    ENCODINGS,
    answer_encoding,
    compressed,
    decompress,
    is_compressed_at_once,
)
from xlaserve.grpc.edge import translate
from xlaserve.grpc.http2.headers import encode_fields
from xlaserve.grpc.http2.messages import PREFIX, PREFIX_BYTES, Problem
from xlaserve.grpc.http2.stream import Buffer, Route, ServerStream
from xlaserve.grpc.infer.infer_codec import DecodedInfer, InferCodec, tensor_offset
from xlaserve.grpc.infer.infer_encoder import JOINED_BYTES, Parts
from xlaserve.grpc.infer.long_messages import (
    LONG_BYTES,
    LongMessages,
    Read,
    Writing,
    is_read_quickly,
    is_written_slowly,
)
from xlaserve.grpc.problems import PROBLEMS
from xlaserve.grpc.protobuf.codec import refusal_of
from xlaserve.serving.call import NOBODY, Peer
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferRequest, InferResponse
from xlaserve.serving.made_arrays import SHORT_BYTES, hold_made, made_bytes, reserve_made
from xlaserve.serving.repeats import Repeats

METHOD = "/inference.GRPCInferenceService/ModelInfer"
_MESSAGE = "ModelInferRequest"

_RESPONSE = ((":status", "200"), ("content-type", "application/grpc+proto"))
_HEAD = encode_fields(_RESPONSE)
_ACCEPTING = (*_RESPONSE, ("grpc-accept-encoding", ACCEPTED))
_HEADS = {
    "": encode_fields(_ACCEPTING),
    **{
        encoding: encode_fields([*_ACCEPTING, ("grpc-encoding", encoding)])
        for encoding in ENCODINGS
    },
}
"""Encoding of the response -> response header block, for clients that use compression."""
_OK = encode_fields([("grpc-status", "0")])


Written: TypeAlias = tuple[list[Buffer], int]
"""The buffers of a length-prefixed message, and the message's uncompressed size."""


class InferFastPath:
    """The route for ModelInfer on one connection; unusual requests take the general path."""

    message_first = True

    def __init__(
        self,
        engine: Engine,
        gates: Gates,
        codec: InferCodec,
        general: Route,
        long: LongMessages,
        *,
        peer: Peer = NOBODY,
        compresses: bool = False,
        compress_answers: bool = True,
        decode: Callable[[Buffer], DecodedInfer] | None = None,
        recognise: Callable[[Buffer], InferRequest | None] | None = None,
        refusal: "Callable[[BaseException], GRPCError] | None" = None,
        repeats: Repeats | None = None,
    ) -> None:
        """`decode`, `recognise` and `refusal` replace the defaults if they are given.

        With `compresses`, requests may be compressed, and so are responses if `compress_answers` is
        set. `repeats` replays answers by request bytes alone, so it is not used with a custom
        `decode`, which also depends on headers.
        """
        self._engine = engine
        self._gates = gates
        self._decode = decode or codec.decode
        self._recognise = recognise or codec.recognise
        self._long = long
        self._make_call = CompressedCall if compresses else FastPathCall
        self._compresses = compresses
        self.compress_answers = compress_answers
        self.encode = codec.encode
        self.encode_typed = codec.encode_typed
        self._general = general
        self.peer = peer
        self._refusal = refusal or refusal_for
        self.repeats = repeats if decode is None else None
        self.placement = tensor_offset

    def begin(self, stream: ServerStream) -> None:
        """Decode the request and start its inference; the response may be sent immediately."""
        message = stream.message
        if message is None or (stream.compressed and not self._compresses):
            self._general.begin(stream)
            return
        stream.message = None
        call = self._make_call(self, stream)
        try:
            self._gates.admit(call)
            record = call.record
            if record is not None:
                # `CallRecord.received`, inlined because the call would double the cost.
                record.bytes_in = len(message)
                record.received_ns = perf_counter_ns()
            if stream.compressed:
                stream.call = call
                self._long.await_for(call, self._inflate(call, stream, message))
                return
            if self.repeats is not None and self._repeat(call, stream, message):
                return
            request = self._recognise(message)
            # Whether the decoded arrays need no further accounting: they are views of the message,
            # or `_decoded` has reserved their bytes.
            is_view = request is not None or len(message) > SHORT_BYTES
            request = request or self._decoded(call, stream, message)
        except BaseException as error:
            _fail(call, error)
            return
        if request is None:
            return  # a thread decodes the request and starts it
        self._engine.begin(call, request)
        if not call.has_ended:
            stream.call = call
            if not is_view:
                hold_made(call, made_bytes(request.inputs))
        elif self.repeats is not None and call.written is not None:
            self.repeats.learn(call, message, request.model_version, call.written)

    def _decoded(
        self, call: "FastPathCall", stream: ServerStream, message: Buffer
    ) -> InferRequest | None:
        """Decode a request and reserve its memory; return None if a thread decodes it instead."""
        if len(message) > LONG_BYTES and not is_read_quickly(message):
            self._read_later(call, stream, message)
            return None
        decoded = self._decode(message)
        size = decoded.elements_bytes
        if size:
            reserve_made(call, size)
            self._read_later(call, stream, message, is_reserved=True)
            return None
        request = self._read(call, decoded)
        if len(message) > SHORT_BYTES:
            reserve_made(call, made_bytes(request.inputs))
        return request

    def _read_later(
        self,
        call: "FastPathCall",
        stream: ServerStream,
        message: Buffer,
        *,
        is_reserved: bool = False,
    ) -> None:
        """Decode a request in a thread, then start it.

        `is_reserved` tells whether memory for the arrays is reserved already.
        """
        stream.call = call
        begin = partial(self._begin_read, call, is_reserved=is_reserved)
        self._long.read(call, self._decode, message, begin)

    def _begin_read(self, call: "FastPathCall", read: Read, *, is_reserved: bool) -> None:
        try:
            request = self._checked(call, read)
            if not is_reserved:
                reserve_made(call, read.made)
        except BaseException as error:
            _fail(call, error)
            return
        self._engine.begin(call, request)

    def _checked(self, call: "FastPathCall", read: Read) -> InferRequest:
        if read.request is None:
            # A missing model takes precedence, as in `_read`.
            self._engine.find(call, read.decoded.model_name, read.decoded.model_version)
            assert read.problem is not None
            raise read.problem
        return read.request

    async def _inflate(self, call: "FastPathCall", stream: ServerStream, message: Buffer) -> None:
        """Decompress a message, in a thread if it is long, and start the request."""
        most, reserve = self._long.max_message_bytes, partial(_reserve, stream)
        try:
            inflated = await decompress(message, stream.head.fields, most, reserve)
            call.place = None
            if call.record is not None:
                call.record.bytes_in = len(inflated)
            request = self._decoded(call, stream, inflated)
        except asyncio.CancelledError:
            return  # a cancelled task would keep the exception, whose frames hold the request
        except ENDS:
            raise
        except BaseException as error:
            call.place = None
            call.fail(error)
            return
        if request is not None:
            self._engine.begin(call, request)

    def _repeat(self, call: "FastPathCall", stream: ServerStream, message: Buffer) -> bool:
        """Replay the cached response to a request with the same bytes; false if there is none."""
        assert self.repeats is not None
        answer = self.repeats.answer(call, message)
        if answer is not None:
            try:
                self.send(call, stream, [answer], len(answer))
            finally:
                call.tell()
        return answer is not None

    def _read(self, call: "FastPathCall", decoded: DecodedInfer) -> InferRequest:
        try:
            return decoded.request()
        except InvalidRequest:
            # If the model does not exist, `find` raises that error; otherwise it attributes this
            # one to the model.
            self._engine.find(call, decoded.model_name, decoded.model_version)
            raise

    def write_in_thread(
        self,
        call: "FastPathCall",
        stream: ServerStream,
        write: Callable[[], Written],
        then: Callable[[list[Buffer], int], None],
        held: int = 0,
    ) -> None:
        """Encode a response in a thread, then pass its buffers to `then` on the event loop.

        `then` is not called if the call was cancelled, or if encoding fails: the client then gets
        the error. `held` bytes of the connection's account are released once the thread has
        finished.
        """

        def written(found: Written | BaseException) -> None:
            stream.owner.account.release(held)
            writing.end()
            stream.call = None
            if not call.notifies_later:
                return  # the call was cancelled, and its observers were notified
            try:
                if isinstance(found, BaseException):
                    self.refuse_instead(call, stream, found)
                else:
                    then(*found)
            except ENDS:
                raise
            except BaseException as error:
                stream.call, call.notifies_later = None, True
                self.refuse_instead(call, stream, error)
            # `stream.call` is set again if `then` has started another thread, for compression.
            if stream.call is None:
                call.end()

        writing = stream.call = Writing(call)
        call.notifies_later = True
        try:
            writing.begin(self._long.threads, write, written)
        except BaseException:
            stream.call, call.notifies_later = None, False
            stream.owner.account.release(held)
            raise

    def send_written(
        self, call: InferCall, stream: ServerStream, head: bytes, parts: list[Buffer], size: int
    ) -> None:
        """Send buffers that include the length prefix; `size` is the uncompressed size."""
        sent = self.send(call, stream, parts, sum(map(len, parts)), head)
        if sent and call.record is not None:
            call.record.sent(size)

    # Called with positional arguments, because keywords would take twice as long.
    def send(
        self,
        call: InferCall,
        stream: ServerStream,
        parts: Sequence[Buffer],
        size: int,
        head: bytes = _HEAD,
    ) -> bool:
        """Send a length-prefixed message; if there is no memory, send an error and return false."""
        if stream.output.answer(stream, head, parts, size, _OK):
            return True
        self.refuse_instead(call, stream, stream.owner.account.refusal("the answer", size))
        return False

    def refuse_instead(self, call: InferCall, stream: ServerStream, error: BaseException) -> None:
        """Record and send an error in place of the response of a call that has already ended."""
        call.outcome = error
        self.refuse(stream, error)

    def refuse(self, stream: ServerStream, error: BaseException) -> None:
        """Send the gRPC status for an error."""
        refusal = self._refusal(error)
        response = _ACCEPTING if self._compresses else _RESPONSE
        fields = [*response, ("grpc-status", str(refusal.status.value))]
        if refusal.message:
            fields.append(("grpc-message", encode_grpc_message(refusal.message)))
        stream.send_headers(encode_fields(fields), end=True)


def refusal_for(error: BaseException) -> GRPCError:
    """Return the GRPCError to send for an exception that prevented a response."""
    if isinstance(error, MalformedMessage | TooManyFields):
        return refusal_of(error, _MESSAGE)
    if isinstance(error, asyncio.CancelledError):
        return GRPCError(Status.CANCELLED, "the request was cancelled")
    translated = translate(METHOD, error)
    if isinstance(translated, GRPCError):
        return translated
    return GRPCError(Status.INTERNAL, "internal error")


def _fail(call: InferCall, error: BaseException) -> None:
    if isinstance(error, ENDS):
        raise error
    call.fail(error)


class FastPathCall(InferCall):
    """A ModelInfer call on the fast path."""

    awaits_client = False
    method = METHOD
    written: bytes | None = None
    """The response with its length prefix, if it may be cached for replay."""

    def __init__(self, fast_path: InferFastPath, stream: ServerStream) -> None:
        self._fast_path = fast_path
        self._stream = stream
        self.peer = fast_path.peer
        self.headers = stream.head
        self.opened_ns = stream.opened_ns
        if stream.deadline is not None:
            self.deadline = stream.deadline

    def write(self, response: InferResponse, *, last: bool) -> None:
        """Encode and send a response, or send an error if that fails."""
        stream, fast_path = self._stream, self._fast_path
        stream.call = None
        try:
            if is_written_slowly(response):
                work = partial(self._long_parts, response)
                then = partial(fast_path.send_written, self, stream, _HEAD)
                fast_path.write_in_thread(self, stream, work, then)
                return
            parts, size = self._encode(response)
        except ENDS:
            raise
        except BaseException as error:
            fast_path.refuse_instead(self, stream, error)
            return
        parts.insert(0, PREFIX.pack(0, size))
        if self.kept is not None and fast_path.repeats is not None:
            self.written = b"".join(parts) if size <= JOINED_BYTES else None
        record = self.record
        if fast_path.send(self, stream, parts, size + PREFIX_BYTES) and record is not None:
            # `CallRecord.sent`, inlined because the call would double the cost.
            record.bytes_out = size
            record.written_ns = perf_counter_ns()

    def _encode(self, response: InferResponse) -> tuple[Parts, int]:
        fast_path = self._fast_path
        return fast_path.encode_typed(response) if self.typed else fast_path.encode(response)

    def _long_parts(self, response: InferResponse) -> Written:
        parts, size = self._encode(response)
        return [PREFIX.pack(0, size), *parts], size

    def refuse(self, error: BaseException) -> None:
        """Send the gRPC status for an error."""
        self._stream.call = None
        self._fast_path.refuse(self._stream, error)


class CompressedCall(FastPathCall):
    """A ModelInfer call of a client that uses compression."""

    def write(self, response: InferResponse, *, last: bool) -> None:
        """Encode and send a response, compressed if the client accepts that, or an error."""
        stream, fast_path = self._stream, self._fast_path
        stream.call = None
        try:
            if is_written_slowly(response):
                work = partial(self._encode, response)
                fast_path.write_in_thread(self, stream, work, self._compress)
                return
            parts, size = self._encode(response)
            self._compress(parts, size)
        except ENDS:
            raise
        except BaseException as error:
            fast_path.refuse_instead(self, stream, error)

    def _compress(self, parts: list[Buffer], size: int) -> None:
        """Compress a response if that is worthwhile and there is memory for it, then send it."""
        stream, fast_path = self._stream, self._fast_path
        encoding = answer_encoding(stream.head.fields) if fast_path.compress_answers else ""
        then = partial(fast_path.send_written, self, stream, _HEADS[encoding])
        account = stream.owner.account
        if not encoding or is_compressed_at_once(size):
            then(compressed(encoding, parts, size), size)
        elif stream.open and account.spare(COMPRESSED_TIMES * size):
            work = partial(_compressed, encoding, parts, size)
            fast_path.write_in_thread(self, stream, work, then, COMPRESSED_TIMES * size)
        else:
            then(compressed("", parts, size), size)


def _compressed(encoding: str, parts: Sequence[Buffer], size: int) -> Written:
    return compressed(encoding, parts, size), size


def _reserve(stream: ServerStream, count: int) -> None:
    """Reserve bytes for a decompressed message, or release them if `count` is negative.

    Raises GRPCError if there is no memory.
    """
    if count < 0:
        stream.hold(count)
    elif not stream.reserve(count):
        raise GRPCError(*PROBLEMS[Problem.NO_MEMORY])
