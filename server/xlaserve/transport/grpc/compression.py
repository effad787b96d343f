"""Compressed messages: gzip and deflate, bounded after inflation (gRPC Compression)."""

import asyncio
from collections.abc import Iterable

from grpclib import GRPCError
from grpclib.const import Status

from xlaserve.transport import compression
from xlaserve.transport.compression import BadCompression, InflatesTooFar
from xlaserve.transport.http2.stream import Buffer

_ENCODINGS = ("gzip", "deflate")
"""Of gRPC; deflate is what zlib writes."""
ACCEPTED = ",".join(("identity", *_ENCODINGS))
"""Value of `grpc-accept-encoding`."""

_INLINE_BYTES = 1 << 10
"""A message that is longer is inflated in a thread: it may become a thousand times as long."""


async def decompress(message: Buffer, headers: Iterable[tuple[str, str]], limit: int) -> Buffer:
    """Return a message as it was before `grpc-encoding`.

    Raises GRPCError: UNIMPLEMENTED for an encoding that is not known, INTERNAL where there is none
    or the bytes are not of it, RESOURCE_EXHAUSTED past `limit` bytes.
    """
    encoding = dict(headers).get("grpc-encoding", "identity")
    if encoding == "identity":
        raise GRPCError(Status.INTERNAL, "a compressed message without grpc-encoding")
    if encoding not in _ENCODINGS:
        text = f"grpc-encoding '{encoding[:32]}', this server takes {ACCEPTED}"
        raise GRPCError(Status.UNIMPLEMENTED, text)
    if len(message) <= _INLINE_BYTES:
        return inflate(encoding, message, limit)
    return await asyncio.to_thread(inflate, encoding, message, limit)


def inflate(encoding: str, message: Buffer, limit: int) -> memoryview:
    """Return what was compressed; errors as for `decompress`."""
    try:
        return compression.inflate(encoding, message, limit)
    except BadCompression as error:
        raise GRPCError(Status.INTERNAL, f"the {encoding} message {error}") from None
    except InflatesTooFar:
        text = f"the message is longer than {limit} bytes decompressed (max_message_bytes)"
        raise GRPCError(Status.RESOURCE_EXHAUSTED, text) from None
