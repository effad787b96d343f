"""Translation of exceptions to gRPC statuses, shared by all methods."""

import structlog
from grpclib import GRPCError
from grpclib.const import Status
from grpclib.metadata import encode_grpc_message

from xlaserve.errors import XlaserveError
from xlaserve.grpc.reasons import is_expected
from xlaserve.net.status import wire_status

MAX_MESSAGE_CHARACTERS = 2048
"""Maximum length of a percent-encoded `grpc-message`: clients limit the size of headers."""

_NOT_IMPLEMENTED = "{method} is not implemented by this server"
_log = structlog.get_logger("grpc")


def translate(method: str, error: BaseException) -> GRPCError:
    """Return the GRPCError to send for an exception that a handler raised.

    Unexpected exceptions are logged and become INTERNAL without detail.
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
    """Truncate a message so that it fits into `grpc-message` after percent-encoding."""
    if len(encode_grpc_message(message)) <= MAX_MESSAGE_CHARACTERS:
        return message
    # Percent-encoding turns one character into at most 12; shorten until the result fits.
    kept = message[:MAX_MESSAGE_CHARACTERS]
    while len(encode_grpc_message(kept)) > MAX_MESSAGE_CHARACTERS - 3:
        kept = kept[: len(kept) * 3 // 4]
    return kept + "..."
