"""The general path: runs a request's service method, on either HTTP/2 engine."""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, cast

from grpclib import GRPCError
from grpclib.const import Status
from grpclib.encoding.base import CodecBase
from grpclib.events import _DispatchServerEvents
from grpclib.metadata import Deadline, decode_metadata
from grpclib.protocol import Stream as AcceptedStream
from grpclib.server import Stream
from h2.exceptions import StreamClosedError

from xlaserve.errors import DeadlineExceeded
from xlaserve.errors.panics import ENDS
from xlaserve.grpc.calls import FieldsView, RpcCall
from xlaserve.grpc.edge import translate
from xlaserve.grpc.identifiers import split_binary_lists
from xlaserve.grpc.injection import Injection
from xlaserve.grpc.methods import Method, Row
from xlaserve.grpc.request_headers import NOT_FOUND, Headers
from xlaserve.net.ledger import Account
from xlaserve.serving.call import Call, Operation, Peer, outside_call
from xlaserve.serving.call import Headers as CallHeaders
from xlaserve.serving.call_record import CallRecord
from xlaserve.serving.gates import Gates
from xlaserve.serving.infer_call import AwaitedInfer


class Accepted(Protocol):
    """A transport stream's interface for streaming methods, in addition to grpclib's."""

    @property
    def deadline(self) -> float | None:
        """Return the client's deadline in event loop time, or None."""
        ...

    @property
    def opened_ns(self) -> int:
        """Return the arrival of the headers, by `perf_counter_ns`; 0 means now."""
        ...

    @property
    def account(self) -> Account:
        """Return the connection's account in the memory ledger."""
        ...

    def keep(self) -> int:
        """Return the bytes reserved for the last message read; the caller has to release them.

        Without this call, they are released when the next message is read.
        """
        ...

    def send_now(self, message: bytes) -> bool:
        """Send a message, given without its length prefix, without awaiting.

        Return false, with nothing sent, if headers were not sent yet, if the message would have to
        be queued or compressed, or if the transport does not support this.
        """
        ...

    def reserve(self, count: int) -> bool:
        """Reserve bytes in the ledger; false if there is no memory for them."""
        ...

    def release(self, count: int) -> None:
        """Release bytes reserved in the ledger."""
        ...


class RpcStream(Stream[Any, Any]):
    """grpclib's stream, from which a method reads requests and to which it writes responses."""

    call: Call
    method: Method
    message_seconds: float
    """Time limit in seconds for the message of a unary request."""
    accepted: Accepted
    """The transport's stream."""

    async def recv_message(self) -> Any:
        """Return the next message, or None at the end of a streaming request.

        Raises GRPCError if the message of a unary request is missing or does not arrive in time.
        """
        if self.method.handler.cardinality.client_streaming:
            return await super().recv_message()
        timeout = asyncio.timeout(None)
        due = asyncio.get_running_loop().time() + self.message_seconds
        try:
            async with timeout:
                outside_call().run(timeout.reschedule, due)
                message = await super().recv_message()
        except TimeoutError:
            if not timeout.expired():
                raise
            text = f"no message within {self.message_seconds:g} seconds (message_timeout_seconds)"
            raise GRPCError(Status.CANCELLED, text) from None
        if message is None:
            text = f"{self.method.path.lstrip('/')} needs one message, got none"
            raise GRPCError(Status.UNIMPLEMENTED, text)
        row = self.method.row
        if row.model:
            self.call.model = getattr(message, row.model)
        if row.version:
            self.call.version = getattr(message, row.version)
        return message


class Runner:
    """Runs the service methods of requests; every request is a call that passes the gates."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        codec: CodecBase,
        gates: Gates,
        injection: Injection,
        *,
        message_seconds: float,
    ) -> None:
        """`message_seconds` is the time limit for the message of a unary request."""
        self.methods = methods
        self._codec = codec
        self._gates = gates
        self._injection = injection
        self._message_seconds = message_seconds
        self._dispatch = _DispatchServerEvents()

    async def run(self, accepted: AcceptedStream, headers: Headers, peer: Peer) -> None:
        """Answer a request with valid headers for a known method.

        If the client disconnects or resets the stream, this task is cancelled and sends no status.
        """
        fields = dict(headers)
        method = self.methods[fields[":path"]]
        deadline = cast(Accepted, accepted).deadline
        call = _call(method.row, FieldsView(headers), peer, deadline)
        call.method = method.path
        call.opened_ns = cast(Accepted, accepted).opened_ns
        stream = RpcStream(
            accepted,
            method.path,
            method.handler.cardinality,
            method.handler.request_type,
            method.handler.reply_type,
            codec=_RAW if method.row.raw else self._codec,
            status_details_codec=None,
            dispatch=self._dispatch,
            deadline=_left(deadline),
            user_agent=fields.get("user-agent"),
        )
        stream.call, stream.method = call, method
        stream.message_seconds = self._message_seconds
        stream.accepted = cast(Accepted, accepted)
        stream.metadata = decode_metadata(split_binary_lists(headers))
        refused = await self._outcome(stream)
        await stream.__aexit__(None if refused is None else GRPCError, refused, None)

    def no_method(
        self, path: str, headers: CallHeaders, peer: Peer, deadline: float | None
    ) -> tuple[Status, str]:
        """Return the status and message for a request to an unknown method.

        It passes the gates like any call, so that a client without permission cannot find out
        which methods exist.
        """
        call = RpcCall(Operation.SERVICE, headers, peer, deadline)
        try:
            with self._gates.passing(call):
                return NOT_FOUND
        except ENDS:
            raise
        except BaseException as error:
            refused = translate(path, error)
            return refused.status, refused.message or ""

    async def _outcome(self, stream: RpcStream) -> GRPCError | None:
        """Run the method; return the GRPCError to send, or None if it succeeded.

        The error is newly created and was never raised. A raised exception references the frames
        of its traceback; stored in a local variable of one of them, it would be a reference cycle
        that keeps request and answer alive until the next full garbage collection.
        """
        try:
            with self._gates.passing(stream.call):
                await _in_time(stream.call, self._answer(stream))
        except ENDS:
            raise
        except BaseException as error:
            return translate(stream.method.path, error)
        return None

    async def _answer(self, stream: RpcStream) -> None:
        assert stream.metadata is not None
        if stream.call.record is not None:
            stream._codec = _NotingCodec(stream._codec, stream.call.record)
        with self._injection.into(stream, stream.method.path, stream.metadata):
            await stream.method.handler.func(stream)


def _left(deadline: float | None) -> Deadline | None:
    """Convert a deadline in event loop time to grpclib's type, for service methods."""
    if deadline is None:
        return None
    return Deadline.from_timeout(max(0.0, deadline - asyncio.get_running_loop().time()))


def _call(row: Row, headers: FieldsView, peer: Peer, deadline: float | None) -> Call:
    if row.infers:
        return AwaitedInfer(headers, peer, deadline)
    call = RpcCall(row.operation, headers, peer, deadline)
    call.api, call.carries_calls = row.api, row.carries_calls
    return call


class _NotingCodec(CodecBase):
    """Wraps a codec, and records the sizes of messages in the call record."""

    def __init__(self, codec: CodecBase, record: CallRecord) -> None:
        self._codec = codec
        self._record = record

    @property
    def __content_subtype__(self) -> str:
        """Return the content subtype, after `application/grpc+`."""
        return self._codec.__content_subtype__

    def encode(self, message: Any, message_type: Any) -> bytes:
        """Encode with the wrapped codec, and record the size."""
        data = self._codec.encode(message, message_type)
        self._record.sent(len(data))
        return data

    def decode(self, data: bytes, message_type: Any) -> Any:
        """Decode with the wrapped codec, and record the size."""
        self._record.received(len(data))
        return self._codec.decode(data, message_type)


class _RawCodec(CodecBase):
    """Passes serialized messages through, for methods that decode them themselves."""

    @property
    def __content_subtype__(self) -> str:
        """Return the content subtype, after `application/grpc+`."""
        return "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        """Return the serialized message unchanged."""
        return cast(bytes, message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        """Return the serialized message unchanged."""
        return data


_RAW = _RawCodec()


async def _in_time(call: Call, work: Awaitable[None]) -> None:
    """Await `work`; raise DeadlineExceeded when the call's deadline passes."""
    timeout = asyncio.timeout(None)
    try:
        async with timeout:
            if call.deadline is not None:
                outside_call().run(timeout.reschedule, call.deadline)
            await work
    except TimeoutError:
        if timeout.expired():
            raise DeadlineExceeded from None
        raise
    except StreamClosedError as error:
        # The client has reset the stream, and this task is about to be cancelled.
        raise asyncio.CancelledError(str(error)) from None
