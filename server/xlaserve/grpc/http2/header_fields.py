"""Validated header fields and names, and HPACK's static table (RFC 7541 Appendix A)."""

import re
from collections.abc import Sequence
from operator import itemgetter
from typing import Final, TypeAlias

from xlaserve.grpc.http2 import huffman
from xlaserve.net.bounded_cache import BoundedCache

ENTRY_BYTES = 32
"""Overhead added to the size of a field's name and value (RFC 7541 4.1; RFC 9113 6.5.2)."""

DECIDING: Final = frozenset((b":method", b":path", b"content-type", b"content-length", b"te"))
"""The fields whose values determine the kind of a request; of other fields only the names do."""
OF_A_CONNECTION: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
"""Connection-specific fields, which are malformed in HTTP/2 (RFC 9113 8.2.2)."""
PSEUDO: Final = frozenset((b":method", b":scheme", b":path", b":authority"))

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE = re.compile(rb"[\x00\r\n]")
"""Leading and trailing spaces are accepted, though RFC 9113 forbids them: some gRPC clients send
ids that have them."""
_KNOWN_NAMES = 1024
_KNOWN_NAME_BYTES = 64
_KNOWN_VALUES = 256
_KNOWN_VALUE_BYTES = 256
_MALFORMED = "\n"
"""Prefix of the token of a malformed field; other tokens never begin with it."""


_NONE_KNOWN: Final["BoundedCache[bytes, Field]"] = BoundedCache(0)


class Name:
    """A validated field name."""

    __slots__ = ("_known", "octets", "size", "text", "token")

    def __init__(self, octets: bytes) -> None:
        self.octets = octets
        self.text = octets.decode("latin-1")
        self.size = len(octets) + ENTRY_BYTES
        self.token: str | None = self.text
        """Token of the fields with this name and a valid value; None if the token depends on the
        value."""
        self._known: BoundedCache[bytes, Field] = _NONE_KNOWN
        """Cache of fields by value, shared by all connections; used only if `token` is None."""
        if octets in DECIDING:
            self.token = None
            self._known = BoundedCache(_KNOWN_VALUES)
        elif octets not in PSEUDO and name_problem(octets) is not None:
            self.token = _MALFORMED + self.text

    @property
    def decides(self) -> bool:
        """Tell whether the field's value determines the kind of the request."""
        return self.token is None

    def field(self, value: bytes) -> "Field":
        """Return a field with this name and a value, from the cache if possible."""
        if b"\0" in value or b"\n" in value or b"\r" in value:
            token = _MALFORMED + self.text
        elif self.token is None:
            field = self._known.get(value)
            if field is not None:
                return field
            token = f"{self.text}\n{value.decode('latin-1')}"
            field = token, value, self.size + len(value), self
            if len(value) <= _KNOWN_VALUE_BYTES:
                self._known.keep(value, field)
            return field
        else:
            token = self.token
        return token, value, self.size + len(value), self


Field: TypeAlias = tuple[str, bytes, int, Name]
"""A token, the value, the size, and the name.

Requests whose fields have equal tokens are of the same kind: they differ only in values that do
not affect routing or validation. The token is the name; for the names in `DECIDING` it is the name,
a newline and the value; for a malformed field it begins with a newline. Fields that mean different
things therefore never have the same token."""

token_of = itemgetter(0)
value_of = itemgetter(1)
size_of = itemgetter(2)
name_of = itemgetter(3)


def name_problem(name: bytes) -> str | None:
    """Return why the name of a regular field is malformed, or None (RFC 9113 8.2)."""
    if not _NAME.fullmatch(name):
        return "a header name with uppercase or invalid characters"
    if name in OF_A_CONNECTION:
        return "a connection-specific header"
    return None


def is_bad_value(value: bytes) -> bool:
    """Tell whether a value contains a forbidden character (RFC 9113 8.2.1)."""
    return _BAD_VALUE.search(value) is not None


# --- the static table (RFC 7541, Appendix A) ---------------------------------------------------

_STATIC_TEXT = """\
:authority
:method GET
:method POST
:path /
:path /index.html
:scheme http
:scheme https
:status 200
:status 204
:status 206
:status 304
:status 400
:status 404
:status 500
accept-charset
accept-encoding gzip, deflate
accept-language
accept-ranges
accept
access-control-allow-origin
age
allow
authorization
cache-control
content-disposition
content-encoding
content-language
content-length
content-location
content-range
content-type
cookie
date
etag
expect
expires
from
host
if-match
if-modified-since
if-none-match
if-range
if-unmodified-since
last-modified
link
location
max-forwards
proxy-authenticate
proxy-authorization
range
referer
refresh
retry-after
server
set-cookie
strict-transport-security
transfer-encoding
user-agent
vary
via
www-authenticate"""

NAMES: Final = BoundedCache[bytes, Name](_KNOWN_NAMES)
CODED_NAMES: Final = BoundedCache[bytes, Name](_KNOWN_NAMES)
"""Caches of names by their plain and by their Huffman-coded octets, shared by all connections."""


def name_from(octets: bytes) -> Name:
    name = NAMES.get(octets)
    if name is None:
        name = Name(octets)
        if len(octets) <= _KNOWN_NAME_BYTES:
            NAMES.keep(octets, name)
    return name


def coded_name(octets: bytes) -> Name:
    name = name_from(huffman.decode(octets))
    if len(octets) <= _KNOWN_NAME_BYTES:
        CODED_NAMES.keep(octets, name)
    return name


def _static_fields() -> list[Field]:
    rows = (line.partition(" ") for line in _STATIC_TEXT.split("\n"))
    return [name_from(name.encode()).field(value.encode()) for name, _, value in rows]


STATIC: Final[Sequence[Field]] = _static_fields()
FIRST_DYNAMIC = len(STATIC) + 1
INDEXED = 0x80
INDEXED_STATIC = {INDEXED + index: field for index, field in enumerate(STATIC, 1)}
"""Octet -> field, for indexed fields in the static table; index 0 is invalid."""
FIRST_INDEXED_DYNAMIC = INDEXED + FIRST_DYNAMIC
REFERENCES = re.compile(rb"[\x81-\xfe]+")
"""Matches a sequence of indexed fields of one octet each (RFC 7541 6.1)."""
STATIC_NAMES = {index: name_of(field) for index, field in enumerate(STATIC, 1)}
