"""gRPC errors for requests whose message could not be received."""

from collections.abc import Mapping
from types import MappingProxyType

from grpclib import GRPCError
from grpclib.const import Status

from xlaserve.errors import DeadlineExceeded
from xlaserve.grpc.http2.limits import Http2Limits
from xlaserve.grpc.http2.messages import Problem

PROBLEMS: Mapping[Problem, tuple[Status, str]] = MappingProxyType(
    {
        Problem.NONE: (Status.UNIMPLEMENTED, "{method} needs one message, got none"),
        Problem.SECOND: (Status.UNIMPLEMENTED, "{method} takes one message, got more"),
        Problem.TRUNCATED: (Status.INTERNAL, "the request ended within a message"),
        Problem.TOO_LARGE: (
            Status.RESOURCE_EXHAUSTED,
            "the message has {size} bytes, the limit is {limit} (max_message_bytes)",
        ),
        Problem.FLAG: (Status.INTERNAL, "the first byte of a message is neither 0 nor 1"),
        Problem.EXPIRED: (
            Status.CANCELLED,
            "no message within {seconds:g} seconds (message_timeout_seconds)",
        ),
        Problem.LATE: (Status.DEADLINE_EXCEEDED, str(DeadlineExceeded())),
        Problem.NO_MEMORY: (
            Status.RESOURCE_EXHAUSTED,
            "too many message bytes in progress (max_held_bytes), try again",
        ),
    }
)
"""The gRPC status and message of each problem."""


def refuse(problem: Problem, method: str, limits: Http2Limits, size: int = 0) -> GRPCError:
    """Return the GRPCError for a problem; `size` is the message's declared length in bytes."""
    status, text = PROBLEMS[problem]
    return GRPCError(
        status,
        text.format(
            method=method.lstrip("/"),
            size=size,
            limit=limits.max_message_bytes,
            seconds=limits.message_seconds,
        ),
    )
