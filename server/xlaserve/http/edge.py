"""The mapping of exceptions to HTTP responses, shared by all routes.

The body is `{"error": text}`, except for paths with another error format.
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import TypeVar

import structlog

from xlaserve.errors import (
    BudgetExhausted,
    ModelNotReady,
    RepositoryUnreadable,
    ShuttingDown,
    StillStarting,
    XlaserveError,
)
from xlaserve.errors.access import QuotaExceeded, TooManyRequests, Unauthenticated
from xlaserve.errors.panics import ENDS
from xlaserve.http.compression import UnsupportedEncoding
from xlaserve.http.messages import NO_STORE, HttpResponse, json_response
from xlaserve.http.routing import MakeError, all_plain, plain_error
from xlaserve.net.compression import CODINGS
from xlaserve.net.status import wire_status
from xlaserve.serving.call_record import count_answer
from xlaserve.serving.standing import RETRY_SECONDS

T = TypeVar("T")

MAX_ERROR_CHARACTERS = 8192
"""Maximum length of error texts, which may quote the client."""

RETRY: Mapping[str, str] = MappingProxyType({"Retry-After": str(RETRY_SECONDS)})
"""Headers of temporary refusals."""

_HEADERS: Mapping[type[XlaserveError], Mapping[str, str]] = MappingProxyType(
    {
        UnsupportedEncoding: {
            "Accept-Encoding": ", ".join(c for c in CODINGS if c[:2] != "x-"),
        },
        BudgetExhausted: {"Retry-After": "1"},
        **dict.fromkeys((ModelNotReady, RepositoryUnreadable, ShuttingDown, StillStarting), RETRY),
        # RFC 9110 11.6.1, RFC 6750 3
        Unauthenticated: {"WWW-Authenticate": "Bearer"},
    }
)
"""Additional headers of an error response, by exception type."""

_log = structlog.get_logger("http")


def error_response(
    text: str,
    status: HTTPStatus,
    headers: Mapping[str, str] = MappingProxyType({}),
    *,
    shape: MakeError = plain_error,
    error: BaseException | None = None,
) -> HttpResponse:
    """Return an error response in the error format of the request's path.

    `error` is the exception, or None if there was none.
    """
    shown = text if len(text) <= MAX_ERROR_CHARACTERS else text[:MAX_ERROR_CHARACTERS] + "..."
    # Escape invalid UTF-8 instead of failing to encode it.
    shown = shown.encode(errors="backslashreplace").decode()
    body = json_response(shape(shown, status, error), status)
    # Caches may store 404, 405, 410, 414 and 501 without being told to (RFC 9110, 15.1).
    kept = {**NO_STORE, **headers}
    return HttpResponse(status, parts=body.parts, headers=kept, compressible=False)


async def translate_errors(
    answer: Awaitable[T],
    *,
    method: str,
    path: str,
    shape_of: Callable[[str], MakeError] = all_plain,
) -> T | HttpResponse:
    """Await a response; convert an exception to an error response by the status table."""
    try:
        return await answer
    except ConnectionError:
        raise  # the client disconnected
    except ENDS:
        raise
    except BaseException as error:
        return translate(error, method=method, path=path, shape=shape_of(path))


def translate(
    error: BaseException, *, method: str, path: str, shape: MakeError = plain_error
) -> HttpResponse:
    """Return the error response for an exception; an unexpected exception is logged.

    The size of the response is counted for the call that the exception ended.
    """
    answer = _translated(error, shape, method=method, path=path)
    count_answer(error, answer.size)
    return answer


def _translated(error: BaseException, shape: MakeError, *, method: str, path: str) -> HttpResponse:
    if isinstance(error, XlaserveError):
        headers = _HEADERS.get(type(error), MappingProxyType({}))
        if isinstance(error, QuotaExceeded | TooManyRequests):
            headers = {"Retry-After": str(math.ceil(error.retry_seconds))}
        status = wire_status(error).http
        return error_response(str(error), status, headers, shape=shape, error=error)
    _log.error("unexpected exception", method=method, path=path, exc_info=error)
    return error_response("internal error", HTTPStatus.INTERNAL_SERVER_ERROR, shape=shape)
