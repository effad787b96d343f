"""The general path of a request, from headers to status, on both HTTP/2 engines."""

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
    """The stream of an HTTP/2 engine, as methods with many requests know it."""

    @property
    def deadline(self) -> float | None:
        """Return when the client stops waiting, counted from its headers; None for never."""
        ...

    @property
    def opened_ns(self) -> int:
        """Return the arrival of the headers by the clock of the engine; 0 for now."""
        ...

    @property
    def account(self) -> Account:
        """Return the account of its connection."""
        ...

    def keep(self) -> int:
        """Return the bytes that are counted for the message read last, for the caller to release.

        Without it they are counted until the next message is read.
        """
        ...

    def send_now(self, message: bytes) -> bool:
        """Send a message at once, without its prefix.

        False, and nothing is sent, where nothing was sent before, where another one waits for its
        client, and whatever else `send_message` is there for.
        """
        ...

    def reserve(self, count: int) -> bool:
        """Reserve more bytes; false without memory."""
        ...

    def release(self, count: int) -> None:
        """Release a number of bytes."""
        ...


class RpcStream(Stream[Any, Any]):
    """The stream that a method reads requests from and writes answers to, with its call."""

    call: Call
    method: Method
    message_seconds: float
    """Timeout of the one message of a unary request, in seconds."""
    accepted: Accepted
    """The stream of the engine."""

    async def recv_message(self) -> Any:
        """Return the next message; None where there is no other of many.

        Raises GRPCError where the one message of a request is not there in time.
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
    """Runs the requests of every service, each as a call in its own task."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        codec: CodecBase,
        gates: Gates,
        injection: Injection,
        *,
        message_seconds: float,
    ) -> None:
        """`message_seconds` is the limit for a request's single message."""
        self.methods = methods
        self._codec = codec
        self._gates = gates
        self._injection = injection
        self._message_seconds = message_seconds
        self._dispatch = _DispatchServerEvents()

    async def run(self, accepted: AcceptedStream, headers: Headers, peer: Peer) -> None:
        """Answer a request whose headers are right and whose method is there.

        A request whose client has gone is cancelled: it ends without a status.
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
        """Return the status and the text for a request of a method that does not exist.

        It is a call that passes the gates too: who may not ask is not told what there is.
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
        """Run the method and return why it gave no answer, or None.

        What is returned was never raised. An error that was raised holds the frames that it passed,
        and those that called them: in a local variable of one of these it would be a reference
        cycle, and request and answer would stay until the next full collection.
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
    """Return a deadline as methods of services read it."""
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
    """Reads and writes messages by another codec, and notes how many bytes they have."""

    def __init__(self, codec: CodecBase, record: CallRecord) -> None:
        self._codec = codec
        self._record = record

    @property
    def __content_subtype__(self) -> str:
        """Return the content subtype, after `application/grpc+`."""
        return self._codec.__content_subtype__

    def encode(self, message: Any, message_type: Any) -> bytes:
        """Encode like the codec."""
        data = self._codec.encode(message, message_type)
        self._record.sent(len(data))
        return data

    def decode(self, data: bytes, message_type: Any) -> Any:
        """Decode like the codec."""
        self._record.received(len(data))
        return self._codec.decode(data, message_type)


class _RawCodec(CodecBase):
    """Passes messages on unchanged, for a method with its own codec."""

    @property
    def __content_subtype__(self) -> str:
        """Return the content subtype, after `application/grpc+`."""
        return "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        """Return the message."""
        return cast(bytes, message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        """Return the data."""
        return data


_RAW = _RawCodec()


async def _in_time(call: Call, work: Awaitable[None]) -> None:
    """Wait for the work; raises DeadlineExceeded once the deadline of the call has passed."""
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
        # The client has reset the stream; that this task is cancelled for it comes later.
        raise asyncio.CancelledError(str(error)) from None
