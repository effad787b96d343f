"""Errors as gRPC statuses, for every method of the server alike."""

import structlog
from grpclib import GRPCError
from grpclib.const import Status
from grpclib.metadata import encode_grpc_message

from xlaserve.errors import XlaserveError
from xlaserve.grpc.reasons import is_expected
from xlaserve.net.status import wire_status

MAX_MESSAGE_CHARACTERS = 2048
"""Limit of a percent-encoded `grpc-message`: clients bound their headers."""

_NOT_IMPLEMENTED = "{method} is not implemented by this server"
_log = structlog.get_logger("grpc")


def translate(method: str, error: BaseException) -> GRPCError:
    """Return the status and the text for what a handler raised, in an error that was not raised.

    What nobody expected is logged.
    """
    if isinstance(error, XlaserveError):
        return GRPCError(wire_status(error).grpc, shorten(str(error)))
    if isinstance(error, GRPCError):
        if error.status is Status.UNIMPLEMENTED and error.message is None:
            return GRPCError(error.status, _NOT_IMPLEMENTED.format(method=method.lstrip("/")))
        return GRPCError(error.status, error.message, error.details)
    if not is_expected(error):
        _log.error("unexpected exception", method=method, exc_info=error)
    return GRPCError(Status.INTERNAL, "internal error")


def shorten(message: str) -> str:
    """Cut a message so that it fits into the headers, percent-encoded."""
    if len(encode_grpc_message(message)) <= MAX_MESSAGE_CHARACTERS:
        return message
    # One character takes at most 12 in the encoding; cut so that the result surely fits.
    kept = message[:MAX_MESSAGE_CHARACTERS]
    while len(encode_grpc_message(kept)) > MAX_MESSAGE_CHARACTERS - 3:
        kept = kept[: len(kept) * 3 // 4]
    return kept + "..."
