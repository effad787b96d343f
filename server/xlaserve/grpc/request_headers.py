"""Validation of request headers that grpclib would ignore or fail on without a response."""

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Sequence
from typing import TypeAlias

from grpclib.const import Status
from grpclib.metadata import encode_grpc_message

from xlaserve.grpc.http2.timeout import TIMEOUT, read_timeout

Headers: TypeAlias = Sequence[tuple[str, str]]

_BINARY = "-bin"
GRPC = "application/grpc"
"""Prefix of the content type of gRPC requests."""
_CONTENT_TYPES = frozenset((GRPC, f"{GRPC}+proto"))
"""The accepted content types, without parameters."""
NOT_FOUND = (Status.UNIMPLEMENTED, "Method not found")
"""Status and message for an unknown method."""
NO_SECONDS = 1e-3
"""Requests with a shorter timeout are rejected immediately with DEADLINE_EXCEEDED."""


def is_grpc(content_type: str | None) -> bool:
    """Tell whether a content type is gRPC's, with any parameters."""
    if content_type in _CONTENT_TYPES:
        return True
    return (content_type or "").partition(";")[0].rstrip(" \t") in _CONTENT_TYPES


def is_checked(name: str) -> bool:
    """Tell whether `refusal` checks headers with this name."""
    return name == TIMEOUT or name.endswith(_BINARY)


def refusal(headers: Headers) -> tuple[Status, str] | None:
    """Return the status and message for invalid headers that grpclib would ignore, or None."""
    least: float | None = None
    for name, value in headers:
        if name == TIMEOUT:
            seconds = _seconds(value)
            if seconds is None:
                text = "the grpc-timeout header is not 1 to 8 digits and a unit"
                return Status.INVALID_ARGUMENT, text
            least = seconds if least is None else min(least, seconds)
        elif name.endswith(_BINARY) and not all(map(_is_base64, value.split(","))):
            return Status.INTERNAL, "a header that ends in -bin is not base64"
    if least is not None and least < NO_SECONDS:
        return Status.DEADLINE_EXCEEDED, "the request had already timed out"
    return None


def refusal_headers(status: Status, text: str) -> Headers:
    """Return the headers of a trailers-only response with an error status."""
    return (
        (":status", "200"),
        ("content-type", GRPC),
        ("grpc-status", str(status.value)),
        ("grpc-message", encode_grpc_message(text)),
    )


def malformed(headers: Headers) -> bool:
    """Tell whether a required header is missing (gRPC over HTTP/2)."""
    found = dict(headers)
    if not (":method" in found and ":path" in found):
        return True
    grpc = found[":method"] == "POST" and found.get("content-type", "").startswith(GRPC)
    return grpc and found.get("te") != "trailers"


def timeout_seconds(headers: Headers) -> float | None:
    """Return the timeout of a request in seconds, the shortest if repeated, or None."""
    times = (_seconds(value) for name, value in headers if name == TIMEOUT)
    return min((one for one in times if one is not None), default=None)


def _seconds(value: str) -> float | None:
    return read_timeout(value.encode("latin-1", "replace"))


def _is_base64(value: str) -> bool:
    text = value.strip()
    try:
        b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (Base64Error, ValueError):
        return False
    return True
