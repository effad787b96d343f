"""Names of refusal counters, and the test for unexpected errors."""

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
    """Name the reason of a failure; `listener` is the setting of the endpoint that it came to.

    Errors of the server have the name of their class, and other statuses of gRPC theirs, with
    `Rpc` in front. `UNEXPECTED` is what the log has a traceback of, and nothing else.
    """
    if isinstance(error, XlaserveError):
        return type(error).__name__
    if isinstance(error, asyncio.CancelledError):
        return CANCELLED
    status = rpc_status(error)
    if status is not None:
        return _of_status(status)
    # Its client has left: see `translate_errors` of REST.
    is_left = isinstance(error, ConnectionError) and is_of_http(listener)
    return CANCELLED if is_left else UNEXPECTED


def is_expected(error: BaseException) -> bool:
    """Tell whether an error has its own reason, so that no traceback is logged."""
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
"""Reasons reported as 0 from the start, so that the first one is an increase."""
