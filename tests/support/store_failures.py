"""Failures of an HTTP object server, and the expected error of a load from it."""

import os
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from support.object_server import Handler

STALL_SECONDS = 1.0
"""Stall timeout in seconds that these tests set."""
BODY = frozenset({"page", "object"})
ANY = BODY | {"mark"}


@dataclass(frozen=True)
class Failure:
    """A way to answer requests wrongly, and the expected result."""

    answer: Callable[[Handler], object]
    text: str
    """Part of the load's error message."""
    status: int = 503
    """HTTP status of the load."""
    of: frozenset[str] = ANY
    """Requests that can fail this way: pages, marks (HEAD), objects."""
    again: frozenset[str] = ANY
    """Requests that are retried."""


def _status(number: int, **headers: str) -> Callable[[Handler], object]:
    return lambda handler: handler.head("", 0, number, **headers)


def _half(handler: Handler) -> None:
    content = handler.content(handler.name)
    handler.head(handler.name, len(content))
    handler.wfile.write(content[: len(content) // 2])


def _reset(handler: Handler) -> None:
    handler.close_connection = True
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(handler.connection.detach())


def _half_then_reset(handler: Handler) -> None:
    _half(handler)
    _reset(handler)


def _half_then_silence(handler: Handler) -> None:
    _half(handler)
    handler.shelves.released.wait()


def _silence(handler: Handler) -> None:
    handler.shelves.released.wait()


def _not_http(handler: Handler) -> None:
    handler.close_connection = True
    handler.wfile.write(b"220 mail.example.org ESMTP\r\n")


def _longer(handler: Handler) -> None:
    content = handler.content(handler.name)
    handler.head(handler.name, len(content) + 1)
    handler.wfile.write(content + b"!")


def _without_end(handler: Handler) -> None:
    content = handler.content(handler.name)
    handler.head(handler.name, None, 200, Transfer_Encoding="chunked")
    handler.wfile.write(b"%x\r\n" % len(content) + content[:-1])


_OBJECT = frozenset({"object"})
_NONE: frozenset[str] = frozenset()
_SILENT = f"no answer within {STALL_SECONDS:g} seconds (remote_stall_seconds)"
FAILURES: Mapping[str, Failure] = {
    "reset": Failure(_reset, "the connection failed with"),
    "reset in the middle": Failure(_half_then_reset, "", of=BODY),
    "short body": Failure(_half, " ended at byte ", of=BODY),
    "chunk without end": Failure(_without_end, "", of=frozenset({"page"})),
    # A listing and a HEAD share the time of one attempt.
    "slow headers": Failure(_silence, _SILENT, again=_OBJECT),
    "slow body": Failure(_half_then_silence, _SILENT, of=BODY, again=_OBJECT),
    "not HTTP": Failure(_not_http, "the connection failed with BadStatusLine"),
    **{
        f"{number}": Failure(_status(number), f"the server answered {number} for ")
        for number in (408, 425, 500, 502, 503, 504)
    },
    "429 with Retry-After": Failure(_status(429, Retry_After="1"), "the server answered 429 for "),
    **{
        f"{number}": Failure(_status(number), f"the server answered {number} for ", again=_NONE)
        for number in (401, 403, 407, 501, 505)
    },
    **{
        f"{number}": Failure(
            _status(number), f"the server answered {number} for ", status=400, again=_NONE
        )
        for number in (404, 410)
    },
    "wrong length": Failure(_longer, " bytes, expected ", status=400, of=_OBJECT, again=_NONE),
}
