"""Long messages of ModelInfer, decoded and encoded in threads."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from xlaserve.concurrency.host import HostJob, HostThreads
from xlaserve.errors import InvalidRequest
from xlaserve.errors.message import MalformedMessage
from xlaserve.grpc.http2.stream import Buffer
from xlaserve.grpc.infer.infer_codec import DecodedInfer
from xlaserve.grpc.infer.typed_contents import MOST_FIELDS
from xlaserve.grpc.protobuf.wire import read_size
from xlaserve.serving.call import Call
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferRequest, InferResponse
from xlaserve.serving.made_arrays import made_bytes
from xlaserve.serving.stations.station import Working
from xlaserve.tensors import BYTES

T = TypeVar("T")

LONG_BYTES = 16 << 10
"""Messages of this size are inspected before they are decoded on the event loop."""
_LONG_FIELD_BYTES = 16 << 10
"""Bytes of a field that a thread decodes; raw contents are not decoded."""
_RAW_INPUT_CONTENTS = 0x3A
_WRITTEN_ELEMENTS = 4096
"""Elements of BYTES encoded on the event loop: some 0.5 ms."""


class Read(NamedTuple):
    """A request that a thread has read."""

    decoded: DecodedInfer
    request: InferRequest | None
    """None if its bytes do not match its tensors."""
    problem: InvalidRequest | None
    """The reason, then."""
    made: int
    """Bytes of the decoded arrays."""


def is_read_quickly(message: Buffer) -> bool:
    """Tell whether raw contents are the only large part of a message."""
    pos, end = 0, len(message)
    try:
        for _ in range(MOST_FIELDS):
            if pos >= end:
                return True
            tag = message[pos]
            size, pos = read_size(message, pos + 1)
            if size > _LONG_FIELD_BYTES and tag != _RAW_INPUT_CONTENTS:
                return False
            pos += size
    except (IndexError, MalformedMessage):
        pass
    return False


def is_written_slowly(response: InferResponse) -> bool:
    """Tell whether an answer has many elements of BYTES."""
    for output in response.outputs:
        if output.datatype is BYTES and output.data.size > _WRITTEN_ELEMENTS:
            return True
    return False


class LongMessages:
    """Decodes requests in threads, and continues their calls."""

    def __init__(self, threads: HostThreads, max_message_bytes: int) -> None:
        self.threads = threads
        self.max_message_bytes = max_message_bytes

    def read(
        self,
        call: InferCall,
        decode: Callable[[Buffer], DecodedInfer],
        message: Buffer,
        then: Callable[[Read], None],
    ) -> None:
        """Decode a request in a thread; `then` gets it, unless the call has ended."""

        def done(found: Read | BaseException) -> None:
            if call.has_ended:
                return
            call.place = None
            if isinstance(found, BaseException):
                call.fail(found)
            else:
                then(found)

        call.wait_at(Working(self.threads.start(lambda: read_long(decode, message), done)))
        call.expire_in_time()

    def await_for(self, call: InferCall, work: Coroutine[Any, Any, None]) -> None:
        """Have a coroutine work for a call, and cancel it when the call ends."""
        call.wait_at(Working(asyncio.ensure_future(work)))
        call.expire_in_time()


class Writing:
    """An answer that a thread writes, for its stream to cancel."""

    __slots__ = ("_call", "_job")

    awaits_client = False

    def __init__(self, call: Call) -> None:
        self._call = call
        self._job: HostJob | None = None

    def begin(
        self,
        threads: HostThreads,
        write: Callable[[], T],
        written: Callable[[T | BaseException], None],
    ) -> None:
        """Encode it in a thread; `written` must call `end`, to break a reference cycle."""
        self._job = threads.start(write, written)

    def end(self) -> None:
        """Keep the job no longer."""
        self._job = None

    def cancel(self, reason: str) -> None:
        """Cancel it, unless a thread has started: then its result is dropped."""
        if self._job is not None:
            self._job.cancel()
        self._call.end(asyncio.CancelledError(reason))


def read_long(decode: Callable[[Buffer], DecodedInfer], message: Buffer) -> Read:
    """Decode a request, in any thread; raises like `decode`."""
    decoded = decode(message)
    try:
        request = decoded.request()
    except InvalidRequest as error:
        return Read(decoded, None, error, 0)
    return Read(decoded, request, None, made_bytes(request.inputs))
