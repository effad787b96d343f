"""Status line and headers of an answer, as aiohttp writes them and in its order."""

import time
from collections.abc import Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from xlaserve.core.server import NAME
from xlaserve.transport.rest.messages import HttpResponse


def response_head(answer: HttpResponse, size: int, *, is_last: bool) -> bytes:
    """Write the header block of an answer whose body has so many bytes."""
    headers = tuple(answer.headers.items()) if answer.headers else ()
    if is_last:
        headers = (*headers, ("Connection", "close"))
    return short_head(answer.status, answer.content_type, size, int(time.time()), headers)


@lru_cache(maxsize=256)
def short_head(
    status: HTTPStatus,
    content_type: str,
    size: int,
    date_seconds: int,
    headers: Sequence[tuple[str, str]] = (),
) -> bytes:
    """Write a header block with a date; the same call, by far the most common, runs no Python."""
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {content_type}",
        f"Server: {NAME}",
        *[f"{name}: {value}" for name, value in headers],
        f"Content-Length: {size}",
        f"Date: {formatdate(date_seconds, usegmt=True)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode()
