"""Where errors become gRPC statuses, for every method of the server alike."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import structlog
from grpclib import GRPCError
from grpclib.const import Status
from grpclib.events import RecvRequest, listen
from grpclib.exceptions import ProtocolError, StreamTerminatedError
from grpclib.metadata import encode_grpc_message
from grpclib.server import Server, Stream

from xlaserve.errors import XlaserveError
from xlaserve.transport.status import wire_status

MAX_MESSAGE_CHARACTERS = 2048
"""Length of a percent-encoded `grpc-message`: clients bound the headers that they accept."""

_NOT_IMPLEMENTED = "{method} is not implemented by this server"
_log = structlog.get_logger("grpc")


def translate_errors(server: Server, *, message_timeout_seconds: float) -> None:
    """Answer every exception of every handler with the status that the table gives it.

    Listens last: what other listeners raise is translated too. A request that does not send its
    one message in time is ended.
    """
    listen(server, RecvRequest, partial(_wrap, message_timeout_seconds))


async def _wrap(message_timeout_seconds: float, event: RecvRequest) -> None:
    inner, method = event.method_func, event.method_name

    async def call(stream: Stream[Any, Any]) -> None:
        if not stream._cardinality.client_streaming:
            receive = partial(_one_message, method, message_timeout_seconds, stream.recv_message)
            stream.recv_message = receive  # type: ignore[method-assign]
        try:
            await inner(stream)
        except Exception as error:
            translated = translate(method, error)
            if translated is error:
                raise
            raise translated from error

    event.method_func = call


async def _one_message(method: str, seconds: float, receive: Callable[[], Awaitable[Any]]) -> Any:
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            message = await receive()
    except TimeoutError:
        if not timeout.expired():
            raise
        text = f"no message came in {seconds:g} seconds (message_timeout_seconds)"
        raise GRPCError(Status.CANCELLED, text) from None
    if message is None:
        text = f"{method.lstrip('/')} needs one message, none came"
        raise GRPCError(Status.UNIMPLEMENTED, text)
    return message


def translate(method: str, error: Exception) -> Exception:
    """Return the GRPCError for what a handler raised, or the same where grpclib handles it."""
    if isinstance(error, XlaserveError):
        return GRPCError(wire_status(error).grpc, shorten(str(error)))
    if isinstance(error, GRPCError):
        if error.status is Status.UNIMPLEMENTED and error.message is None:
            return GRPCError(error.status, _NOT_IMPLEMENTED.format(method=method.lstrip("/")))
        return error
    if isinstance(error, StreamTerminatedError | ProtocolError | TimeoutError):
        return error  # the client went away, or its deadline passed: grpclib's to handle
    _log.error("unexpected exception", method=method, exc_info=error)
    return GRPCError(Status.INTERNAL, "internal error")


def shorten(message: str) -> str:
    """Cut a message so that it fits into the headers once it is percent-encoded."""
    if len(encode_grpc_message(message)) <= MAX_MESSAGE_CHARACTERS:
        return message
    # One character takes at most 12 in the encoding; cut so that the result surely fits.
    kept = message[:MAX_MESSAGE_CHARACTERS]
    while len(encode_grpc_message(kept)) > MAX_MESSAGE_CHARACTERS - 3:
        kept = kept[: len(kept) * 3 // 4]
    return kept + "..."
