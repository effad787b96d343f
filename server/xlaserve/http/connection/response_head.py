"""Status line and headers of a response."""

import time
from collections.abc import Iterable, Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from xlaserve.http.messages import HttpResponse
from xlaserve.residence.server import NAME

Fields = Iterable[tuple[str, str]]


def response_head(answer: HttpResponse, size: int, *, is_last: bool) -> bytes:
    """Return the header block of a response with a body of this size."""
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
    """Return a header block with a Date; identical calls within a second hit the cache."""
    framing = (("Content-Length", str(size)),)
    fields = (("Content-Type", content_type), ("Server", NAME), *headers, *framing)
    return any_head(status, fields, date_seconds)


def any_head(status: HTTPStatus, fields: Fields, date_seconds: int) -> bytes:
    """Return a header block with a Date; raises ValueError if a value contains a line break."""
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        *[f"{name}: {value}" for name, value in fields],
        f"Date: {formatdate(date_seconds, usegmt=True)}",
    ]
    block = "\r\n".join([*lines, "", ""])
    if not block.count("\n") == block.count("\r") == len(lines) + 1:
        raise ValueError("a response header contains a line break")
    return block.encode(errors="surrogateescape")
