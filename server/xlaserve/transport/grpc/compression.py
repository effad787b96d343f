"""Compressed messages: gzip, bounded after inflation (gRPC Compression)."""

import asyncio
from collections.abc import Iterable

from grpclib import GRPCError
from grpclib.const import Status

from xlaserve.transport import compression
from xlaserve.transport.compression import BadCompression, InflatesTooFar
from xlaserve.transport.http2.stream import Buffer

ACCEPTED = "identity,gzip"
"""Value of `grpc-accept-encoding`."""

_GZIP = "gzip"
_INLINE_BYTES = 1 << 10
"""A message that is longer is inflated in a thread: it may become a thousand times as long."""


async def decompress(message: Buffer, headers: Iterable[tuple[str, str]], limit: int) -> Buffer:
    """Return a message as it was before `grpc-encoding`.

    Raises GRPCError: UNIMPLEMENTED for an encoding that is not gzip, INTERNAL where there is none
    or the bytes are not of it, RESOURCE_EXHAUSTED past `limit` bytes.
    """
    encoding = dict(headers).get("grpc-encoding", "identity")
    if encoding == "identity":
        raise GRPCError(Status.INTERNAL, "a compressed message without grpc-encoding")
    if encoding != _GZIP:
        text = f"grpc-encoding '{encoding[:32]}', this server takes {ACCEPTED}"
        raise GRPCError(Status.UNIMPLEMENTED, text)
    if len(message) <= _INLINE_BYTES:
        return inflate(message, limit)
    return await asyncio.to_thread(inflate, message, limit)


def inflate(message: Buffer, limit: int) -> memoryview:
    """Return what gzip has compressed; errors as for `decompress`."""
    try:
        return compression.inflate(_GZIP, message, limit)
    except BadCompression as error:
        raise GRPCError(Status.INTERNAL, f"the {_GZIP} message {error}") from None
    except InflatesTooFar:
        text = f"the message is longer than {limit} bytes decompressed (max_message_bytes)"
        raise GRPCError(Status.RESOURCE_EXHAUSTED, text) from None
