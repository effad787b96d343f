"""The mapping of errors to HTTP answers, for every route alike.

Their shape is `{"error": text}`, but for paths that have another one.
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
"""Limit of error texts, which quote clients."""

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
"""Headers that an error's answer must carry."""

_log = structlog.get_logger("http")


def error_response(
    text: str,
    status: HTTPStatus,
    headers: Mapping[str, str] = MappingProxyType({}),
    *,
    shape: MakeError = plain_error,
    error: BaseException | None = None,
) -> HttpResponse:
    """Answer a text in the shape that errors have at the path of a request.

    `error` is what was raised, None where nothing was.
    """
    shown = text if len(text) <= MAX_ERROR_CHARACTERS else text[:MAX_ERROR_CHARACTERS] + "..."
    # Broken UTF-8 is shown as it came, escaped.
    shown = shown.encode(errors="backslashreplace").decode()
    body = json_response(shape(shown, status, error), status)
    # Caches keep some errors unasked: 404, 405, 410, 414 and 501 (RFC 9110, 15.1).
    kept = {**NO_STORE, **headers}
    return HttpResponse(status, parts=body.parts, headers=kept, compressible=False)


async def translate_errors(
    answer: Awaitable[T],
    *,
    method: str,
    path: str,
    shape_of: Callable[[str], MakeError] = all_plain,
) -> T | HttpResponse:
    """Await an answer; an exception becomes the one that the status table gives it."""
    try:
        return await answer
    except ConnectionError:
        raise  # the client went away
    except ENDS:
        raise
    except BaseException as error:
        return translate(error, method=method, path=path, shape=shape_of(path))


def translate(
    error: BaseException, *, method: str, path: str, shape: MakeError = plain_error
) -> HttpResponse:
    """Return the answer that an exception becomes; one that nobody expected is logged.

    Its bytes are those of the call that the exception has ended.
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
