"""Content codings of HTTP bodies: gzip and deflate, in both directions, with size limits."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from xlaserve.errors import InvalidBody, TooLarge, Unsupported
from xlaserve.http.accept import MOST_CHARACTERS, MOST_KNOWN
from xlaserve.net import compression
from xlaserve.net.bounded_cache import remembered
from xlaserve.net.compression import CODINGS, BadCompression, InflatesTooFar
from xlaserve.tensors import Buffer

IDENTITY = "identity"


class UnsupportedEncoding(Unsupported):
    """A body in an unsupported content coding (HTTP 501 with `Accept-Encoding`)."""

    def __init__(self, coding: str) -> None:
        super().__init__(f"the content encoding '{coding[:40]}'")


def inflate(coding: str, body: Buffer, limit_bytes: int) -> memoryview:
    """Decompress a body; raises InvalidBody, or TooLarge before the output exceeds the limit."""
    with _refusing(coding, limit_bytes):
        return compression.inflate(coding, body, limit_bytes)


@contextmanager
def _refusing(coding: str, limit_bytes: int) -> Iterator[None]:
    try:
        yield
    except BadCompression as error:
        raise InvalidBody(f"the {coding} body {error}") from None
    except InflatesTooFar:
        raise TooLarge("the decompressed body", limit_bytes, "max_message_bytes") from None


async def inflate_within(
    coding: str,
    body: Buffer,
    limit_bytes: int,
    reserve: Callable[[int], None],
    run: Callable[[Callable[[], bool]], Awaitable[bool]],
) -> memoryview:
    """Decompress a body in threads within memory limits; raises like `inflate` and `reserve`."""
    with _refusing(coding, limit_bytes):
        return await compression.inflate_within(coding, body, limit_bytes, reserve, run)


def request_coding(content_encoding: str) -> str:
    """Return the coding of a request body; raises UnsupportedEncoding."""
    coding = content_encoding.strip().lower()
    if coding in ("", IDENTITY) or coding in CODINGS:
        return coding or IDENTITY
    raise UnsupportedEncoding(coding)


@remembered(MOST_CHARACTERS, MOST_KNOWN)  # clients send the same header with every request
def accepted_coding(accept_encoding: str) -> str:
    """Return the best supported coding that `Accept-Encoding` allows."""
    weights: dict[str, float] = {}
    for item in accept_encoding.lower().split(","):
        name, _, parameters = item.partition(";")
        weights[name.strip()] = _weight(parameters)
    best = max(CODINGS, key=lambda coding: weights.get(coding, 0))
    return best if weights.get(best, 0) > 0 else IDENTITY


def _weight(parameters: str) -> float:
    _, _, text = parameters.partition("q=")
    try:
        return float(text) if text else 1.0
    except ValueError:
        return 0.0
