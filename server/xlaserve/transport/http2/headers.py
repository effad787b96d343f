"""Header blocks: read with the hpack library and checked, or written as constant bytes."""

import re
from collections.abc import Iterable
from typing import Any, Generic, TypeAlias, TypeVar

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

from xlaserve.transport.http2.errors import ConnectionFailure
from xlaserve.transport.http2.frames import ErrorCode

Fields: TypeAlias = list[tuple[str, str]]
"""Names and values; every character stands for one byte (ISO 8859-1)."""

R = TypeVar("R")
"""What an application makes of a head, once for all requests that have the same."""

HARD_FACTOR = 4
"""Past the limit a request is refused; at so many times it, the connection ends."""

_MAX_CACHED_BLOCKS = 64
_MAX_CACHED_BYTES = 1024
_MAX_WRITTEN = 256

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE = re.compile(rb"[\x00\r\n]")
"""Spaces at the ends, which RFC 9113 forbids, are let through: gRPC clients send ids with them."""
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_OF_A_CONNECTION = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)


class Head(Generic[R]):
    """The header section of a request."""

    __slots__ = ("content_length", "fields", "method", "path", "problem", "route", "too_large")

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.method = ""
        self.path = ""
        self.content_length: int | None = None
        self.problem: str | None = None
        """Why it is malformed (RFC 9113, 8.1.1), if it is."""
        self.too_large = False
        self.route: R | None = None


class HeaderReader(Generic[R]):
    """Reads the header blocks of one connection, in their order.

    A block that was seen before is not decoded again, as long as the dynamic table is the one
    that it was decoded with.
    """

    def __init__(self, max_bytes: int) -> None:
        self._decoder = Decoder(max_header_list_size=max_bytes * HARD_FACTOR)
        self._max_bytes = max_bytes
        self._seen: dict[bytes, Head[R]] = {}

    def seen(self, block: bytes) -> Head[R] | None:
        """Return what `read` returned for the same bytes, if that still holds."""
        return self._seen.get(block)

    def read(self, block: bytes) -> Head[R]:
        """Return the head of a request; a malformed one says so in `problem`.

        Raises ConnectionFailure where the block cannot be decoded: the table is lost with it.
        """
        before = self._table()
        raw = self._decode(block)
        changed = self._table() != before
        head = _head(raw)
        head.too_large = sum(len(name) + len(value) + 32 for name, value in raw) > self._max_bytes
        if changed or len(self._seen) >= _MAX_CACHED_BLOCKS:
            self._seen.clear()
        if not changed and head.problem is None and len(block) <= _MAX_CACHED_BYTES:
            self._seen[block] = head
        return head

    def _table(self) -> tuple[int, int, int]:
        """Return what differs when a block has changed the table: each entry is a new object."""
        entries = self._decoder.header_table.dynamic_entries
        newest = id(entries[0]) if entries else 0
        return len(entries), newest, self._decoder.header_table.maxsize

    def read_trailers(self, block: bytes) -> str | None:
        """Decode the trailers of a request, and say what is wrong with them."""
        self._seen.clear()  # they may have changed the table
        for name, value in self._decode(block):
            if name in _PSEUDO or name[:1] == b":":
                return "a pseudo-header in the trailers"
            problem = _field_problem(name, value)
            if problem:
                return problem
        return None

    def _decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        try:
            return list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            limit = f"header lists of {self._max_bytes * HARD_FACTOR} bytes (max_header_bytes)"
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, f"too much for {limit}") from error
        except (HPACKError, IndexError, ValueError) as error:
            raise ConnectionFailure(
                ErrorCode.COMPRESSION_ERROR, "a header block that is not HPACK"
            ) from error


def _head(raw: list[tuple[bytes, bytes]]) -> Head[Any]:
    head: Head[Any] = Head([(n.decode("latin-1"), v.decode("latin-1")) for n, v in raw])
    head.problem = _problem(raw)
    if head.problem is None:
        found = dict(head.fields)
        head.method, head.path = found[":method"], found[":path"]
        lengths = {value for name, value in head.fields if name == "content-length"}
        if lengths:
            length = lengths.pop()
            if not lengths and length.isascii() and length.isdigit() and len(length) < 20:
                head.content_length = int(length)
            else:
                head.problem = "a content-length that is no number, or more than one"
    return head


def _problem(raw: list[tuple[bytes, bytes]]) -> str | None:
    """Say why a request is malformed (RFC 9113, 8.2 and 8.3), or None."""
    pseudo: dict[bytes, bytes] = {}
    regular = False
    for name, value in raw:
        if name[:1] == b":":
            if regular:
                return "a pseudo-header behind a header"
            if name in pseudo or name not in _PSEUDO:
                return "a pseudo-header that is unknown, or there twice"
            if _BAD_VALUE.search(value):
                return "a pseudo-header with a character that is not allowed"
            pseudo[name] = value
        else:
            regular = True
            problem = _field_problem(name, value)
            if problem:
                return problem
    if not pseudo.get(b":path") or b":method" not in pseudo or b":scheme" not in pseudo:
        return "a request without :method, :scheme or :path"
    return None


def _field_problem(name: bytes, value: bytes) -> str | None:
    if not _NAME.fullmatch(name):
        return "a header name that is not in lower case, or has a character that is not allowed"
    if _BAD_VALUE.search(value):
        return "a header value with a character that is not allowed"
    if name in _OF_A_CONNECTION or (name == b"te" and value != b"trailers"):
        return "a header that is about the connection"
    return None


# --- what we send ------------------------------------------------------------------------------


class HeaderWriter:
    """Writes header blocks that need no table, and remembers those that come again."""

    def __init__(self) -> None:
        self._written: dict[tuple[tuple[str, str], ...], bytes] = {}

    def write(self, fields: Iterable[tuple[str, str]]) -> bytes:
        """Return the block of a response."""
        key = tuple(fields)
        block = self._written.get(key)
        if block is None:
            block = encode_fields(key)
            if len(self._written) < _MAX_WRITTEN and len(block) <= _MAX_CACHED_BYTES:
                self._written[key] = block
        return block


def encode_fields(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return fields as literals that are not indexed, so that no table has to agree (RFC 7541)."""
    parts = []
    for name, value in fields:
        if (name, value) == (":status", "200"):
            parts.append(b"\x88")
        elif name == ":status":
            parts.append(b"\x08" + _string(value))
        else:
            parts.append(b"\x00" + _string(name) + _string(value))
    return b"".join(parts)


def _string(text: str) -> bytes:
    octets = text.encode("latin-1", "replace")
    return _length(len(octets)) + octets


def _length(number: int) -> bytes:
    """Write a length with a prefix of seven bits (RFC 7541, 5.1)."""
    if number < 127:
        return bytes((number,))
    number -= 127
    octets = bytearray((127,))
    while number >= 128:
        octets.append(number & 127 | 128)
        number >>= 7
    octets.append(number)
    return bytes(octets)
