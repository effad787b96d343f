"""Names of failure reasons for metrics, and the test for unexpected errors."""

import asyncio
from collections.abc import Iterator

from grpclib.const import Status

from xlaserve import errors
from xlaserve.errors import XlaserveError
from xlaserve.errors import access as access_errors
from xlaserve.errors import code as code_errors
from xlaserve.errors import language as language_errors
from xlaserve.errors import sequence as sequence_errors
from xlaserve.net.status import is_of_http, rpc_status
from xlaserve.serving.observability.failures import CANCELLED, UNEXPECTED


def reason_of(error: BaseException, listener: str = "") -> str:
    """Return the failure reason of an error; `listener` is the setting of the call's endpoint.

    The reason is the class name of an XlaserveError, or `Rpc` and the name of another gRPC status.
    Exactly the errors with reason `UNEXPECTED` are logged with a traceback.
    """
    if isinstance(error, XlaserveError):
        return type(error).__name__
    if isinstance(error, asyncio.CancelledError):
        return CANCELLED
    status = rpc_status(error)
    if status is not None:
        return _of_status(status)
    # With HTTP, a ConnectionError means that the client disconnected.
    is_left = isinstance(error, ConnectionError) and is_of_http(listener)
    return CANCELLED if is_left else UNEXPECTED


def is_expected(error: BaseException) -> bool:
    """Tell whether an error is expected, so that no traceback is logged."""
    return reason_of(error) != UNEXPECTED


_MODULES = (access_errors, code_errors, errors, language_errors, sequence_errors)


def _names_of_errors() -> Iterator[str]:
    for module in _MODULES:
        for name, kind in vars(module).items():
            if isinstance(kind, type) and issubclass(kind, XlaserveError):
                yield name


def _of_status(status: Status) -> str:
    return "Rpc" + "".join(word.capitalize() for word in status.name.split("_"))


KNOWN_REASONS = tuple(
    sorted(
        {
            CANCELLED,
            UNEXPECTED,
            *_names_of_errors(),
            *(_of_status(status) for status in Status if status is not Status.OK),
        }
        - {XlaserveError.__name__}
    )
)
"""Reasons whose counters are exported as 0 at startup, so that the first failure is an increase."""
