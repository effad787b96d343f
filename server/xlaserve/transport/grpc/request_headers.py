"""What the headers of a request say, checked before grpclib falls silent over them."""

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Sequence
from types import MappingProxyType
from typing import TypeAlias

from grpclib.const import Status

Headers: TypeAlias = Sequence[tuple[str, str]]

_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_SECONDS = MappingProxyType({"H": 3600, "M": 60, "S": 1, "m": 1e-3, "u": 1e-6, "n": 1e-9})
GRPC = "application/grpc"
"""What the content type of a request begins with."""
NOT_FOUND = (Status.UNIMPLEMENTED, "Method not found")
"""What is answered to a request for a method that is not there."""
_NO_SECONDS = 1e-3
"""A time that is over before anything can be done."""


def refusal(headers: Headers) -> tuple[Status, str] | None:
    """Return the status and the text with which a request is refused, or None."""
    problem = header_problem(headers)
    if problem is not None:
        return problem
    seconds = timeout_seconds(headers)
    if seconds is not None and seconds < _NO_SECONDS:
        return Status.DEADLINE_EXCEEDED, "the time for the request was over at once"
    return None


def refusal_headers(status: Status, text: str) -> Headers:
    """Return the only headers of the answer to a request that is refused."""
    return (
        (":status", "200"),
        ("content-type", GRPC),
        ("grpc-status", str(status.value)),
        ("grpc-message", text),
    )


def malformed(headers: Headers) -> bool:
    """Tell whether a header is missing without which it is no request (gRPC over HTTP/2)."""
    found = dict(headers)
    if not (":method" in found and ":path" in found):
        return True
    grpc = found[":method"] == "POST" and found.get("content-type", "").startswith(GRPC)
    return grpc and found.get("te") != "trailers"


def header_problem(headers: Headers) -> tuple[Status, str] | None:
    """Say what is wrong with request headers on which grpclib would fall silent."""
    for name, value in headers:
        if name == "grpc-timeout" and not _TIMEOUT.fullmatch(value):
            text = "the grpc-timeout header is not 1 to 8 digits and a unit"
            return Status.INVALID_ARGUMENT, text
        if name.endswith("-bin") and not all(map(_is_base64, value.split(","))):
            return Status.INTERNAL, "a header that ends in -bin is not base64"
    return None


def timeout_seconds(headers: Headers) -> float | None:
    """Return how long a request may take, the shortest where it says so more than once."""
    times = (_TIMEOUT.fullmatch(value) for name, value in headers if name == "grpc-timeout")
    return min((int(m[1]) * _SECONDS[m[2]] for m in times if m), default=None)


def _is_base64(value: str) -> bool:
    text = value.strip()
    try:
        b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (Base64Error, ValueError):
        return False
    return True
