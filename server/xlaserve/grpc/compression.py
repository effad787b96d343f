"""Compression of gRPC messages (gzip, deflate), with a limit on the inflated size."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from grpclib import GRPCError
from grpclib.const import Status

from xlaserve.grpc.http2.messages import PREFIX, PREFIX_BYTES
from xlaserve.grpc.http2.stream import Buffer
from xlaserve.net import compression
from xlaserve.net.compression import BadCompression, InflatesTooFar
from xlaserve.net.ledger import Account

ENCODINGS = ("gzip", "deflate")
"""Supported values of `grpc-encoding`. In gRPC, `deflate` means the zlib format."""
ACCEPTED = ",".join(("identity", *ENCODINGS))
"""The `grpc-accept-encoding` header that the server sends."""

_INLINE_BYTES = 1 << 10
"""Longer messages are inflated in a thread: they can grow a thousandfold."""
_LEAST_BYTES = 256
"""Smaller responses are not worth compressing."""
_AT_ONCE_BYTES = 16 << 10
"""Larger responses are compressed in a thread."""
COMPRESSED_TIMES = 2
"""Memory reserved to compress a response in a thread, as a multiple of its size: the response
itself and a compressed copy that is at most as long."""


async def decompress(
    message: Buffer,
    headers: Iterable[tuple[str, str]],
    limit: int,
    reserve: Callable[[int], None] = lambda count: None,
) -> Buffer:
    """Decompress a message according to the request's `grpc-encoding` header.

    `reserve` accounts for the memory needed; see `inflate_within`.
    Raises GRPCError: UNIMPLEMENTED if the encoding is unknown, INTERNAL if the header is missing
    or the data is invalid, RESOURCE_EXHAUSTED if the result is longer than `limit` bytes.
    """
    encoding = dict(headers).get("grpc-encoding", "identity")
    if encoding == "identity":
        raise GRPCError(Status.INTERNAL, "a compressed message without grpc-encoding")
    if encoding not in ENCODINGS:
        text = f"grpc-encoding '{encoding[:32]}', this server takes {ACCEPTED}"
        raise GRPCError(Status.UNIMPLEMENTED, text)
    with _refusing(encoding, limit):
        if len(message) > _INLINE_BYTES:
            return await compression.inflate_within(
                encoding, message, limit, reserve, asyncio.to_thread
            )
        inflated = compression.inflate(encoding, message, limit)
        reserve(len(inflated))
        return inflated


def answer_encoding(headers: Iterable[tuple[str, str]]) -> str:
    """Return the encoding for the responses to a request, or an empty string for no compression.

    Answers use the encoding of the request if the client also accepts it; a client that sends
    uncompressed requests gets uncompressed answers.
    """
    fields = dict(headers)
    encoding = fields.get("grpc-encoding", "")
    accepted = fields.get("grpc-accept-encoding", "").replace(" ", "").split(",")
    return encoding if encoding in ENCODINGS and encoding in accepted else ""


async def compress(encoding: str, data: Buffer, account: Account) -> Buffer:
    """Compress a length-prefixed message if that saves a quarter and there is memory for it.

    Otherwise `data` is returned unchanged.
    """
    size = len(data) - PREFIX_BYTES
    if size < _LEAST_BYTES:
        return data
    message = memoryview(data)[PREFIX_BYTES:]
    work = partial(compression.deflate_where_worth, encoding, [message], size)
    if is_compressed_at_once(size):
        deflated = work()
    elif account.spare(COMPRESSED_TIMES * size):
        job = asyncio.ensure_future(asyncio.to_thread(work))
        # Release on completion, not on cancellation: cancelling does not stop the thread.
        job.add_done_callback(lambda _: account.release(COMPRESSED_TIMES * size))
        deflated = await asyncio.shield(job)
    else:
        return data
    return data if deflated is None else PREFIX.pack(1, len(deflated)) + deflated


def compressed(encoding: str, parts: Sequence[Buffer], size: int) -> list[Buffer]:
    """Return the length prefix and the parts of a message, compressed if that is worthwhile."""
    if encoding and size >= _LEAST_BYTES:
        deflated = compression.deflate_where_worth(encoding, parts, size)
        if deflated is not None:
            return [PREFIX.pack(1, len(deflated)), deflated]
    return [PREFIX.pack(0, size), *parts]


def is_compressed_at_once(size: int) -> bool:
    """Tell whether `size` bytes are few enough to compress on the event loop's thread."""
    return size <= _AT_ONCE_BYTES


@contextmanager
def _refusing(encoding: str, limit: int) -> Iterator[None]:
    try:
        yield
    except BadCompression as error:
        raise GRPCError(Status.INTERNAL, f"the {encoding} message {error}") from None
    except InflatesTooFar:
        text = f"the message is longer than {limit} bytes decompressed (max_message_bytes)"
        raise GRPCError(Status.RESOURCE_EXHAUSTED, text) from None
