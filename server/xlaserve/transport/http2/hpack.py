"""Header blocks, decoded (HPACK, RFC 7541).

A block is decoded once, in one loop. Most of it refers to fields that were sent before, and these
are objects that were checked then: a field carries the token by which requests of one kind are
recognised, and its size. That costs some 0.1 us a field, and four times as much for one that is
written out.
"""

import re
from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import Final, NoReturn, TypeAlias

from xlaserve.transport.bounded_cache import BoundedCache
from xlaserve.transport.http2 import huffman

TABLE_BYTES = 4096
"""The largest dynamic table, as RFC 9113, 6.5.2 has it where no SETTINGS say else."""
ENTRY_BYTES = 32
"""Bytes a field counts beside name and value (RFC 7541, 4.1; RFC 9113, 6.5.2)."""

DECIDING: Final = frozenset((b":method", b":path", b"content-type", b"content-length", b"te"))
"""The fields whose values decide what kind of request it is. Of all others only the names do."""
OF_A_CONNECTION: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
"""Fields that no request has over HTTP/2 (RFC 9113, 8.2.2)."""
PSEUDO: Final = frozenset((b":method", b":scheme", b":path", b":authority"))

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE = re.compile(rb"[\x00\r\n]")
"""Spaces at the ends, which RFC 9113 forbids, are accepted: gRPC clients send ids with them."""
_KNOWN_NAMES = 1024
_KNOWN_NAME_BYTES = 64
_STRIDE = 2048
"""So many bytes of a block are decoded before its size is looked at."""
_MALFORMED = "\n"
"""Prefix of the token of a malformed field, and of no other."""


class MalformedBlock(Exception):
    """A block cannot be decoded: the table is lost with it (RFC 7541, 2.3.3, 4.2, 5.1 and 5.2)."""


class BlockTooLarge(Exception):
    """The fields of a block are more than the limit."""


class Name:
    """A name of fields, checked."""

    __slots__ = ("octets", "size", "text", "token")

    def __init__(self, octets: bytes) -> None:
        self.octets = octets
        self.text = octets.decode("latin-1")
        self.size = len(octets) + ENTRY_BYTES
        self.token: str | None = self.text
        """The token of the fields whose values have nothing wrong; None where the value decides."""
        if octets in DECIDING:
            self.token = None
        elif octets not in PSEUDO and name_problem(octets) is not None:
            self.token = _MALFORMED + self.text

    @property
    def decides(self) -> bool:
        """Tell whether the value decides what kind of request it is."""
        return self.token is None

    def field(self, value: bytes) -> "Field":
        """Return a field of this name."""
        if b"\0" in value or b"\n" in value or b"\r" in value:
            token = _MALFORMED + self.text
        elif self.token is None:
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
_CODED_NAMES: Final = BoundedCache[bytes, Name](_KNOWN_NAMES)
"""Names that were seen, on any connection, as they are and in the Huffman code."""


def _name(octets: bytes) -> Name:
    name = _NAMES.get(octets)
    if name is None:
        name = Name(octets)
        if len(octets) <= _KNOWN_NAME_BYTES:
            _NAMES.keep(octets, name)
    return name


def _coded_name(octets: bytes) -> Name:
    name = _name(huffman.decode(octets))
    if len(octets) <= _KNOWN_NAME_BYTES:
        _CODED_NAMES.keep(octets, name)
    return name


def _static_fields() -> list[Field]:
    rows = (line.partition(" ") for line in _STATIC_TEXT.split("\n"))
    return [_name(name.encode()).field(value.encode()) for name, _, value in rows]


STATIC: Final[Sequence[Field]] = _static_fields()
FIRST_DYNAMIC = len(STATIC) + 1
INDEXED = 0x80
INDEXED_STATIC = {INDEXED + index: field for index, field in enumerate(STATIC, 1)}
"""The fields that one octet stands for whatever was sent before. Index 0 is none of them."""
FIRST_INDEXED_DYNAMIC = INDEXED + FIRST_DYNAMIC
REFERENCES = re.compile(rb"[\x81-\xfe]+")
"""Fields of one octet each (6.1)."""
_STATIC_NAMES = {index: name_of(field) for index, field in enumerate(STATIC, 1)}


# --- the decoder -------------------------------------------------------------------------------


class Decoder:
    """Decodes the blocks of one connection in their order; holds its dynamic table."""

    def __init__(self, max_list_bytes: int) -> None:
        self._max_list_bytes = max_list_bytes
        self.table: deque[Field] = deque()
        """The dynamic table, from the newest entry on."""
        self._table_bytes = 0
        self.max_table_bytes = TABLE_BYTES
        self.changes = 0
        """Counts what has changed the table: blocks may mean something else since."""
        self.list_bytes = 0
        """The size of the fields of the last block."""
        self.refers = False
        """Whether the last block referred to the table."""

    def decode(self, block: bytes) -> list[Field]:
        """Return the fields of a block. Raises MalformedBlock and BlockTooLarge.

        The table is lost with a block that is either of them.
        """
        found: list[Field] = []
        self.list_bytes, self.refers = 0, False
        position, end = 0, len(block)
        try:
            while position < end and self.list_bytes <= self._max_list_bytes:
                # At least an octet for each field: they are not many before they are counted.
                position = self._decode_part(block, position, min(end, position + _STRIDE), found)
        except (LookupError, MalformedBlock, huffman.MalformedHuffman) as error:
            if sum(map(size_of, found)) > self._max_list_bytes:
                raise BlockTooLarge from error
            raise MalformedBlock(str(error)) from error
        if position != end or self.list_bytes > self._max_list_bytes:
            self._refuse(found, position > end)
        return found

    def _refuse(self, found: list[Field], is_cut_off: bool) -> NoReturn:
        # The last string of a block that is cut off lacks octets, and its field is none.
        if self.list_bytes - is_cut_off * size_of(found[-1]) > self._max_list_bytes:
            raise BlockTooLarge
        raise MalformedBlock("a string that is cut off")

    def insert(self, fields: Sequence[Field], size: int) -> None:
        """Add fields of `size` bytes to the table, in order, and evict the oldest ones (4.4)."""
        table = self.table
        table.extendleft(fields)
        self.changes += len(fields)
        size += self._table_bytes
        most, pop = self.max_table_bytes, table.pop
        while size > most:
            size -= pop()[2]
        self._table_bytes = size

    # Inlined as far as most blocks go.
    def _decode_part(  # noqa: C901, PLR0912, PLR0915
        self, block: bytes, position: int, stop: int, found: list[Field]
    ) -> int:
        """Append the fields that begin before `stop`; return where the next one begins."""
        append, table = found.append, self.table
        list_bytes, table_bytes = self.list_bytes, self._table_bytes
        changes, decode = self.changes, huffman.decode
        while position < stop:
            octet = block[position]
            position += 1
            if octet >= INDEXED:
                if octet < FIRST_INDEXED_DYNAMIC:
                    field = INDEXED_STATIC[octet]
                else:
                    self.refers = True
                    index = octet - INDEXED
                    if octet == 0xFF:
                        index, position = integer(block, position, 0x7F)
                    field = table[index - FIRST_DYNAMIC]
                append(field)
                list_bytes += field[2]
                continue
            if octet >= 0x40:  # with incremental indexing (6.2.1)
                most = 0x3F
            elif octet < 0x20:  # without indexing (6.2.2), or never indexed (6.2.3)
                most = 0x0F
            else:
                if found:
                    raise MalformedBlock("a change of the table's size behind a field")  # 4.2
                position = self._resize(block, position, octet & 0x1F)
                table_bytes, changes = self._table_bytes, self.changes
                continue
            index = octet & most
            if not index:
                length = block[position]
                position += 1
                if length & 0x7F != 0x7F:
                    is_coded = length & 0x80
                    length &= 0x7F
                    octets = block[position : position + length]
                    position += length
                    if is_coded:
                        name = _CODED_NAMES.get(octets) or _coded_name(octets)
                    else:
                        name = _NAMES.get(octets) or _name(octets)
                else:
                    octets, position = long_string(block, position, length)
                    name = _name(octets)
            elif index != most and index < FIRST_DYNAMIC:
                name = _STATIC_NAMES[index]
            else:
                if index == most:
                    index = block[position]
                    position += 1
                    if index < 0x80:
                        index += most
                    else:
                        index, position = integer(block, position - 1, most)
                if index >= FIRST_DYNAMIC:
                    self.refers = True
                    name = table[index - FIRST_DYNAMIC][3]
                else:
                    name = _STATIC_NAMES[index]
            length = block[position]
            position += 1
            if length < 0x7F:
                value = block[position : position + length]
                position += length
            elif length & 0x7F != 0x7F:
                length &= 0x7F
                value = decode(block[position : position + length])
                position += length
            else:
                value, position = long_string(block, position, length)
            token = name.token
            size = name.size + len(value)
            list_bytes += size
            if token is None or b"\0" in value or b"\n" in value or b"\r" in value:
                field = name.field(value)
            else:
                field = token, value, size, name
            append(field)
            if most == 0x3F:  # the newest entry, without the oldest ones (4.4)
                table.appendleft(field)
                changes += 1
                table_bytes += size
                while table_bytes > self.max_table_bytes:
                    table_bytes -= table.pop()[2]
        self.list_bytes, self._table_bytes, self.changes = list_bytes, table_bytes, changes
        return position

    def _resize(self, block: bytes, position: int, size: int) -> int:
        if size == 0x1F:
            size, position = integer(block, position, 0x1F)
        if size > TABLE_BYTES:
            raise MalformedBlock(f"a table of {size} bytes, at most {TABLE_BYTES}")  # 6.3
        self.changes += 1
        self.max_table_bytes = size
        while self._table_bytes > size:
            self._table_bytes -= self.table.pop()[2]
        return position


_MAX_INTEGER_OCTETS = 5


def integer(block: bytes, position: int, number: int) -> tuple[int, int]:
    """Return a number that goes on behind its prefix, and the position behind it (5.1)."""
    for shift in range(0, 7 * _MAX_INTEGER_OCTETS, 7):
        octet = block[position]
        position += 1
        number += (octet & 0x7F) << shift
        if octet < 0x80:
            return number, position
    raise MalformedBlock("a number that is too long")


def long_string(block: bytes, position: int, length: int) -> tuple[bytes, int]:
    """Return a string that is long or in the Huffman code, and the position behind it (5.2).

    Both may be past the end of the block.
    """
    is_coded = length >= 0x80
    length &= 0x7F
    if length == 0x7F:
        length, position = integer(block, position, length)
    octets = block[position : position + length]
    return huffman.decode(octets) if is_coded else octets, position + length
