"""Compressed messages: gzip, bounded after inflation (gRPC Compression)."""

import asyncio
import zlib
from collections.abc import Iterable

from grpclib import GRPCError
from grpclib.const import Status

ACCEPTED = "identity,gzip"
"""Value of `grpc-accept-encoding`."""

_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_INLINE_BYTES = 1 << 10
"""A message that is longer is inflated in a thread: it may become a thousand times as long."""


async def decompress(
    message: "bytes | memoryview", headers: Iterable[tuple[str, str]], limit: int
) -> bytes:
    """Return a message as it was before `grpc-encoding`.

    Raises GRPCError: UNIMPLEMENTED for an encoding that is not gzip, INTERNAL where there is none
    or the bytes are not of it, RESOURCE_EXHAUSTED past `limit` bytes.
    """
    encoding = dict(headers).get("grpc-encoding", "identity")
    if encoding == "identity":
        raise GRPCError(Status.INTERNAL, "a compressed message without grpc-encoding")
    if encoding != "gzip":
        text = f"grpc-encoding '{encoding[:32]}', this server takes {ACCEPTED}"
        raise GRPCError(Status.UNIMPLEMENTED, text)
    if len(message) <= _INLINE_BYTES:
        return inflate(message, limit)
    return await asyncio.to_thread(inflate, message, limit)


def inflate(message: "bytes | memoryview", limit: int) -> bytes:
    """Return what gzip has compressed; errors as for `decompress`."""
    stream = zlib.decompressobj(_GZIP_WINDOW)
    try:
        # One byte more tells whether there is more than the limit.
        inflated = stream.decompress(message, limit + 1)
    except zlib.error:
        raise GRPCError(Status.INTERNAL, "the message is not gzip") from None
    if len(inflated) > limit:
        text = f"the message is longer than {limit} bytes decompressed (max_message_bytes)"
        raise GRPCError(Status.RESOURCE_EXHAUSTED, text)
    if not stream.eof:
        raise GRPCError(Status.INTERNAL, "the message is not gzip to its end")
    return inflated
