"""Decodes and encodes long ModelInfer messages in threads."""

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
"""Messages longer than this are decoded on the event loop only if `is_read_quickly`."""
_LONG_FIELD_BYTES = 16 << 10
"""Messages with a field longer than this are decoded in a thread, except for raw contents."""
_RAW_INPUT_CONTENTS = 0x3A
_WRITTEN_ELEMENTS = 4096
"""Maximum number of BYTES elements encoded on the event loop, in about 0.5 ms."""


class Read(NamedTuple):
    """The result of decoding a request in a thread."""

    decoded: DecodedInfer
    request: InferRequest | None
    """The request; None if it is invalid."""
    problem: InvalidRequest | None
    """Why the request is invalid, or None."""
    made: int
    """Bytes of the arrays allocated by decoding."""


def is_read_quickly(message: Buffer) -> bool:
    """Tell whether raw contents are the only large fields of a message."""
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
    """Tell whether a response has so many BYTES elements that a thread should encode it."""
    for output in response.outputs:
        if output.datatype is BYTES and output.data.size > _WRITTEN_ELEMENTS:
            return True
    return False


class LongMessages:
    """Decodes requests in threads, then continues their calls on the event loop."""

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
        """Decode a request in a thread, then pass it to `then` unless the call has ended."""

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
        """Run a coroutine for a call; it is cancelled if the call ends first."""
        call.wait_at(Working(asyncio.ensure_future(work)))
        call.expire_in_time()


class Writing:
    """Encoding of a response in a thread; the stream's `call`, so that the stream can cancel it."""

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
        """Run `write` in a thread; its callback `written` must call `end`."""
        self._job = threads.start(write, written)

    def end(self) -> None:
        """Drop the reference to the job, which would be a reference cycle."""
        self._job = None

    def cancel(self, reason: str) -> None:
        """Cancel the job, or drop its result if the thread has started, and end the call."""
        if self._job is not None:
            self._job.cancel()
        self._call.end(asyncio.CancelledError(reason))


def read_long(decode: Callable[[Buffer], DecodedInfer], message: Buffer) -> Read:
    """Decode a request completely; may run in any thread. Raises as `decode` does."""
    decoded = decode(message)
    try:
        request = decoded.request()
    except InvalidRequest as error:
        return Read(decoded, None, error, 0)
    return Read(decoded, request, None, made_bytes(request.inputs))
