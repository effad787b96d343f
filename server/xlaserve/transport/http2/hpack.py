"""Header blocks, decoded (HPACK, RFC 7541).

A block is decoded once, in one loop. Most of it refers to fields that were sent before, and these
are objects that were checked then: a field carries the token by which requests of one kind are
recognised, and its size. That costs some 0.1 us a field, and four times as much for one that is
written out.
"""

import re
from collections import deque
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final, TypeAlias

from xlaserve.transport.bounded_cache import BoundedCache
from xlaserve.transport.http2 import huffman

TABLE_BYTES = 4096
"""The largest dynamic table, as RFC 9113, 6.5.2 has it where no SETTINGS say else."""
ENTRY_BYTES = 32
"""What a field counts beside its name and value (RFC 7541, 4.1; RFC 9113, 6.5.2)."""

DECIDING: Final = frozenset((b":method", b":path", b"content-type", b"content-length", b"te"))
"""The fields whose values decide what kind of request it is. Of all others only the names do."""
OF_A_CONNECTION: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
"""Fields that no request has over HTTP/2 (RFC 9113, 8.2.2)."""
PSEUDO: Final = frozenset((b":method", b":scheme", b":path", b":authority"))

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE = re.compile(rb"[\x00\r\n]")
"""Spaces at the ends, which RFC 9113 forbids, are let through: gRPC clients send ids with them."""
_KNOWN_NAMES = 1024
_KNOWN_NAME_BYTES = 64
_STRIDE = 2048
"""So many bytes of a block are decoded before its size is looked at."""
_MALFORMED = "\n"
"""How the token of a malformed field begins, and no other."""


class MalformedBlock(Exception):
    """A block cannot be decoded: the table is lost with it (RFC 7541, 2.3.3, 4.2, 5.1 and 5.2)."""


class BlockTooLarge(Exception):
    """The fields of a block are more than the limit."""


class Name:
    """A name of fields, checked."""

    __slots__ = ("decides", "octets", "size", "text", "token")

    def __init__(self, octets: bytes) -> None:
        self.octets = octets
        self.text = octets.decode("latin-1")
        self.size = len(octets) + ENTRY_BYTES
        self.decides = octets in DECIDING
        is_malformed = octets not in PSEUDO and name_problem(octets) is not None
        self.token = _MALFORMED + self.text if is_malformed else self.text
        """Recognises a field whose value may be any that is not malformed."""

    def field(self, value: bytes) -> "Field":
        """Return a field of this name."""
        if b"\0" in value or b"\n" in value or b"\r" in value:
            token = _MALFORMED + self.text
        elif self.decides:
            token = f"{self.text}\n{value.decode('latin-1')}"
        else:
            token = self.token
        return token, value, self.size + len(value), self


Field: TypeAlias = tuple[str, bytes, int, Name]
"""A token, the value, the size, and the name.

Requests whose fields have the same tokens differ only in values that decide nothing here. A token
holds a newline behind a name that decides, and begins with one where the field is malformed, so
that no two fields that mean different things have the same."""

token_of = itemgetter(0)
value_of = itemgetter(1)
size_of = itemgetter(2)
name_of = itemgetter(3)


def name_problem(name: bytes) -> str | None:
    """Say what is wrong with the name of a field that is no pseudo-header (RFC 9113, 8.2)."""
    if not _NAME.fullmatch(name):
        return "a header name that is not in lower case, or has a character that is not allowed"
    if name in OF_A_CONNECTION:
        return "a header that is about the connection"
    return None


def is_bad_value(value: bytes) -> bool:
    """Tell whether a value has a character that none may have (RFC 9113, 8.2.1)."""
    return _BAD_VALUE.search(value) is not None


def list_size(fields: Iterable[Field]) -> int:
    """Return the size of a field section (RFC 9113, 6.5.2)."""
    return sum(map(size_of, fields))


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

_NAMES: Final = BoundedCache[bytes, Name](_KNOWN_NAMES)
"""Names that were seen, on any connection."""


def _name(octets: bytes) -> Name:
    name = _NAMES.get(octets)
    if name is None:
        name = Name(octets)
        if len(octets) <= _KNOWN_NAME_BYTES:
            _NAMES.keep(octets, name)
    return name


def _static_fields() -> list[Field]:
    rows = (line.partition(" ") for line in _STATIC_TEXT.split("\n"))
    return [_name(name.encode()).field(value.encode()) for name, _, value in rows]


STATIC: Final[Sequence[Field]] = _static_fields()
_FIRST_DYNAMIC = len(STATIC) + 1
_INDEXED = 0x80
_INDEXED_STATIC = {_INDEXED + index: field for index, field in enumerate(STATIC, 1)}
"""The fields that one octet stands for whatever was sent before. Index 0 is none of them."""
_FIRST_INDEXED_DYNAMIC = _INDEXED + _FIRST_DYNAMIC
_STATIC_NAMES = {index: name_of(field) for index, field in enumerate(STATIC, 1)}


# --- the decoder -------------------------------------------------------------------------------


class Decoder:
    """Decodes the blocks of one connection in their order; holds its dynamic table."""

    def __init__(self, max_list_bytes: int) -> None:
        self._max_list_bytes = max_list_bytes
        self.table: deque[Field] = deque()
        """The dynamic table, from the newest entry on."""
        self._table_bytes = 0
        self._max_table_bytes = TABLE_BYTES
        self.changes = 0
        """Counts what has changed the table: blocks may mean something else since."""

    def decode(self, block: bytes) -> list[Field]:
        """Return the fields of a block. Raises MalformedBlock and BlockTooLarge.

        The table is lost with a block that is either of them.
        """
        found: list[Field] = []
        start, end, size = 0, len(block), 0
        try:
            while True:
                counted = len(found)
                # At least an octet for each field: they are not many before they are counted.
                start = self._decode_part(block, start, min(end, start + _STRIDE), found)
                size += list_size(found[counted:] if counted else found)
                if start >= end or size > self._max_list_bytes:
                    break
        except (LookupError, MalformedBlock, huffman.MalformedHuffman) as error:
            if list_size(found) > self._max_list_bytes:
                raise BlockTooLarge from error
            raise MalformedBlock(str(error)) from error
        if start > end:  # the last string lacks octets
            size -= size_of(found.pop())
        if size > self._max_list_bytes:
            raise BlockTooLarge
        if start > end:
            raise MalformedBlock("a string that is cut off")
        return found

    def refers(self, fields: Iterable[Field]) -> bool:
        """Tell whether one of these fields is an entry of the dynamic table."""
        entries = set(map(id, self.table))
        return any(id(field) in entries for field in fields)

    # Inlined as far as most blocks go: this is what a request costs whose headers vary.
    def _decode_part(  # noqa: C901, PLR0912, PLR0915
        self, block: bytes, position: int, stop: int, found: list[Field]
    ) -> int:
        """Append the fields that begin before `stop`; return where the next one begins."""
        append, table = found.append, self.table
        while position < stop:
            octet = block[position]
            position += 1
            if octet >= _INDEXED:
                if octet < _FIRST_INDEXED_DYNAMIC:
                    append(_INDEXED_STATIC[octet])
                elif octet != 0xFF:
                    append(table[octet - _FIRST_INDEXED_DYNAMIC])
                else:
                    index, position = _integer(block, position, 0x7F)
                    append(table[index - _FIRST_DYNAMIC])
                continue
            if octet >= 0x40:  # with incremental indexing (6.2.1)
                most = 0x3F
            elif octet < 0x20:  # without indexing (6.2.2), or never indexed (6.2.3)
                most = 0x0F
            else:
                if found:
                    raise MalformedBlock("a change of the table's size behind a field")  # 4.2
                position = self._resize(block, position, octet & 0x1F)
                continue
            index = octet & most
            if index:
                if index == most:
                    more = block[position]
                    if more < 0x80:
                        index += more
                        position += 1
                    else:
                        index, position = _integer(block, position, most)
                if index < _FIRST_DYNAMIC:
                    name = _STATIC_NAMES[index]
                else:
                    name = table[index - _FIRST_DYNAMIC][3]
            else:
                octets, position = _string(block, position)
                name = _NAMES.get(octets) or _name(octets)
            length = block[position]
            position += 1
            is_coded = length & 0x80
            length &= 0x7F
            if length == 0x7F:
                length, position = _integer(block, position, 0x7F)
            value = block[position : position + length]
            position += length
            if is_coded:
                value = huffman.decode(value)
            if name.decides or b"\0" in value or b"\n" in value or b"\r" in value:
                field = name.field(value)
            else:
                field = name.token, value, name.size + len(value), name
            append(field)
            if most == 0x3F:
                self._add(field)
        return position

    def _add(self, field: Field) -> None:
        """Make a field the newest entry of the table, without the oldest ones (4.4)."""
        table = self.table
        table.appendleft(field)
        self.changes += 1
        self._table_bytes += field[2]
        while self._table_bytes > self._max_table_bytes:
            self._table_bytes -= table.pop()[2]

    def _resize(self, block: bytes, position: int, size: int) -> int:
        if size == 0x1F:
            size, position = _integer(block, position, 0x1F)
        if size > TABLE_BYTES:
            raise MalformedBlock(f"a table of {size} bytes, at most {TABLE_BYTES}")  # 6.3
        self.changes += 1
        self._max_table_bytes = size
        while self._table_bytes > size:
            self._table_bytes -= self.table.pop()[2]
        return position


_MAX_INTEGER_OCTETS = 5


def _integer(block: bytes, position: int, number: int) -> tuple[int, int]:
    """Return a number that goes on behind its prefix, and the position behind it (5.1)."""
    for shift in range(0, 7 * _MAX_INTEGER_OCTETS, 7):
        octet = block[position]
        position += 1
        number += (octet & 0x7F) << shift
        if octet < 0x80:
            return number, position
    raise MalformedBlock("a number that is too long")


def _string(block: bytes, position: int) -> tuple[bytes, int]:
    """Return a string, and the position behind it (5.2); both may be past the end."""
    length = block[position]
    position += 1
    is_coded = length & 0x80
    length &= 0x7F
    if length == 0x7F:
        length, position = _integer(block, position, length)
    octets = block[position : position + length]
    return huffman.decode(octets) if is_coded else octets, position + length
