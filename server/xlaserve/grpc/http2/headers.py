"""Decoded request headers, cached by header block; encoding of response headers."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from xlaserve.grpc.http2.dynamic_table import BlockValues
from xlaserve.grpc.http2.errors import ConnectionFailure
from xlaserve.grpc.http2.frames import ErrorCode
from xlaserve.grpc.http2.header_fields import (
    PSEUDO,
    Field,
    is_bad_value,
    name_problem,
    token_of,
    value_of,
)
from xlaserve.grpc.http2.hpack import BlockTooLarge, Decoder, MalformedBlock
from xlaserve.grpc.http2.layouts import Layouts
from xlaserve.grpc.http2.timeout import TIMEOUT, read_timeout
from xlaserve.net.bounded_cache import BoundedCache

Fields: TypeAlias = list[tuple[str, str]]
"""Pairs of name and value, decoded as ISO 8859-1: one character per byte."""

R = TypeVar("R")
"""The route type of the application; there is one route per kind of request."""

HARD_FACTOR = 4
"""A request with more than max_header_bytes of headers is refused; beyond this multiple of the
limit, the connection is ended."""

_MAX_SHAPES = 256
"""Maximum number of cached shapes, shared by all connections."""
_MAX_KINDS = 64
_MAX_KIND_BYTES = 2048
_MAX_BLOCKS = 64
_MAX_BLOCK_BYTES = 1024
_MAX_BLOCK_LIST_BYTES = 4096
_BLOCKS_OF_REST = 256
_MAX_WRITTEN = 256
"""Maximum number of response header blocks cached per connection."""


class _Shape:
    """Facts about all header lists with the same tokens: names, and the values in `DECIDING`.

    Connections share shapes, so a shape holds no other value and nothing derived from one.
    """

    __slots__ = (
        "content_length",
        "deciding",
        "names",
        "places",
        "problem",
        "timeout_place",
        "tokens",
    )

    def __init__(self, found: Sequence[Field], tokens: tuple[str, ...]) -> None:
        self.tokens = tokens
        places: dict[str, tuple[int, ...]] = {}
        for place, (_, _, _, name) in enumerate(found):
            places[name.text] = (*places.get(name.text, ()), place)
        self.names = [name.text for _, _, _, name in found]
        self.places: Mapping[str, tuple[int, ...]] = places
        times = places.get(TIMEOUT, ())
        self.timeout_place: int | None = None if not times else times[0] if len(times) == 1 else -1
        self.deciding = {
            name.text: value.decode("latin-1") for _, value, _, name in found if name.decides
        }
        self.content_length: int | None = None
        self.problem = _problem(found) or self._read_length(found)

    def _read_length(self, found: Sequence[Field]) -> str | None:
        lengths = {found[place][1] for place in self.places.get("content-length", ())}
        if not lengths:
            return None
        length = lengths.pop()
        if lengths or not length.isdigit() or len(length) >= 20:
            return "an invalid or duplicate content-length"
        self.content_length = int(length)
        return None


_SHAPES: Final = BoundedCache[tuple[str, ...], _Shape](_MAX_SHAPES)


class RequestKind(Generic[R]):
    """The facts shared by all requests of a connection whose headers have the same tokens.

    These are the names of all headers, and the values of those in `DECIDING`.
    """

    __slots__ = (
        "_deciding",
        "check",
        "content_length",
        "names",
        "places",
        "problem",
        "route",
        "timeout_place",
        "too_large",
        "unchecked_seconds",
    )

    def __init__(self, shape: _Shape, *, too_large: bool) -> None:
        self.names = shape.names
        """Names of the headers, in order."""
        self.places = shape.places
        """Header name -> indices of the headers with that name."""
        self.timeout_place = shape.timeout_place
        """Index of the `grpc-timeout` header; None if absent, -1 if repeated."""
        self._deciding = shape.deciding
        self.too_large = too_large
        """Whether the headers are larger than max_header_bytes."""
        self.content_length = shape.content_length
        self.problem = shape.problem
        """Why requests of this kind are malformed (RFC 9113 8.1.1), or None."""
        self.route: R | None = None
        """The route for requests of this kind; None if they are malformed."""
        self.check: Callable[[Head[R]], R | None] | None = None
        """Called for each request; may return a different route, based on the varying headers."""
        self.unchecked_seconds = math.inf
        """Requests with at least this timeout skip `check`; finite if it only checks timeouts."""

    @property
    def method(self) -> str:
        """Return the HTTP method."""
        return self._deciding.get(":method", "")

    @property
    def path(self) -> str:
        """Return the `:path` pseudo-header."""
        return self._deciding.get(":path", "")

    def get(self, name: str) -> str | None:
        """Return the value of a header in `DECIDING`; None for other headers or if absent."""
        return self._deciding.get(name)


class Head(msgspec.Struct, Generic[R], gc=False):
    """The headers of one request: its kind, and the values, which are assembled on demand."""

    kind: RequestKind[R]
    read: Sequence[bytes] | BlockValues
    """The values of all headers, or the means to assemble them."""
    content_length: int | None
    route: R | None
    """The route of the request; None if it is malformed."""
    timeout: float | None
    """Timeout in seconds, the shortest if there are several, or None (gRPC over
    HTTP/2, Timeout)."""

    @property
    def values(self) -> Sequence[bytes]:
        """Return the values of all headers, in order."""
        values = self.read
        if isinstance(values, BlockValues):
            values = self.read = values.all()
        return values

    @property
    def method(self) -> str:
        """Return the HTTP method."""
        return self.kind.method

    @property
    def path(self) -> str:
        """Return the `:path` pseudo-header."""
        return self.kind.path

    @property
    def problem(self) -> str | None:
        """Return why the request is malformed (RFC 9113 8.1.1), or None."""
        return self.kind.problem

    @property
    def too_large(self) -> bool:
        """Tell whether the headers are larger than max_header_bytes."""
        return self.kind.too_large

    @property
    def fields(self) -> Fields:
        """Return all names and values in order, including pseudo-headers."""
        pairs = zip(self.kind.names, self.values, strict=True)
        return [(name, value.decode("latin-1")) for name, value in pairs]

    def get(self, name: str) -> str | None:
        """Return the value of a header, or None; `name` is in lower case.

        Values of repeated headers are joined with commas (RFC 9110 5.3).
        """
        places = self.kind.places.get(name)
        if places is None:
            return None
        if len(places) == 1:
            return self.values[places[0]].decode("latin-1")
        return ", ".join(self.getall(name))

    def getall(self, name: str) -> list[str]:
        """Return the values of all headers with a name."""
        values = self.values
        return [values[place].decode("latin-1") for place in self.kind.places.get(name, ())]


def _timeout(kind: RequestKind[R], values: Sequence[bytes]) -> float | None:
    place = kind.timeout_place
    if place is None:
        return None
    if place >= 0:
        return read_timeout(values[place])
    return _least_timeout(values[place] for place in kind.places[TIMEOUT])


def _least_timeout(values: Iterable[bytes]) -> float | None:
    return min((one for one in map(read_timeout, values) if one is not None), default=None)


class HeaderReader(Generic[R]):
    """Decodes the header blocks of one connection, which must be passed in order.

    A block equal to an earlier one is not decoded again unless the dynamic table has changed its
    meaning. For a block with a known layout, only the values are decoded.
    """

    def __init__(
        self, max_bytes: int, router: Callable[[RequestKind[R]], R | None] = lambda kind: None
    ) -> None:
        """`router` is called for a kind not cached yet; it returns the route, may set `check`."""
        self._decoder = Decoder(max_bytes * HARD_FACTOR)
        self._table = self._decoder.table
        self._layouts: Layouts[RequestKind[R]] = Layouts(self._decoder, max_bytes)
        self._max_bytes = max_bytes
        self._router = router
        self._kinds: BoundedCache[tuple[str, ...], RequestKind[R]] = BoundedCache(_MAX_KINDS)
        self.seen: dict[bytes, Head[R] | None] = {}
        """Block -> head, for blocks received at least twice; None for a block received once,
        because caching the head of a block that is never repeated would waste memory."""
        self._dependent: list[bytes] = []
        """The blocks in `seen` that reference the dynamic table."""
        self._once = 0
        """Number of blocks in `seen` that were received once."""
        self._rest = 0
        """Number of upcoming blocks that are not recorded in `seen`."""

    def read(self, block: bytes) -> Head[R]:
        """Return the head of a request; `problem` is set if the request is malformed.

        Raises ConnectionFailure if the block cannot be decoded: the dynamic table is then invalid.
        """
        return self.seen.get(block) or self.read_new(block)

    def read_new(self, block: bytes) -> Head[R]:
        """Return the head of a request, as `read` does, for a block without a head in `seen`."""
        table, layouts = self._table, self._layouts
        changes = table.changes
        read = layouts.read(block)
        layout = layouts.layout
        values: Sequence[bytes] | BlockValues
        if layout is None or read is None:
            kind, values = self._decode(block)
            timeout = _timeout(kind, values)
        else:
            kind, values, step = layout.kind, read, layout.timeout_step
            if step is not None:
                timeout = read_timeout(read.strings[step][: read.stop])
            else:
                timeout = None if kind.timeout_place is None else _timeout(kind, read.all())
        head = Head(kind, values, kind.content_length, kind.route, timeout)
        if kind.check is not None and (timeout is None or timeout < kind.unchecked_seconds):
            head.route = kind.check(head) or kind.route
        if table.changes != changes:
            if self._dependent:
                self._drop_dependent()
        elif self._rest:
            self._rest -= 1
        else:
            self._note(block, head)
        return head

    def _decode(self, block: bytes) -> tuple[RequestKind[R], Sequence[bytes]]:
        decoder = self._decoder
        try:
            found = decoder.decode(block)
        except (BlockTooLarge, MalformedBlock) as error:
            raise self._failure(error) from error
        tokens = tuple(map(token_of, found))
        kind = self._kinds.get(tokens)
        if kind is None or decoder.list_bytes > self._max_bytes:
            kind = self._make_kind(found, tokens, decoder.list_bytes)
        if kind.problem is None and not kind.too_large:
            self._layouts.note(kind, block, found)
        return kind, list(map(value_of, found))

    def read_trailers(self, block: bytes) -> str | None:
        """Decode the trailers of a request; return why they are malformed, or None."""
        try:
            found = self._decoder.decode(block)
        except (BlockTooLarge, MalformedBlock) as error:
            raise self._failure(error) from error
        self._drop_dependent()
        for _, value, _, name in found:
            if name.octets[:1] == b":":
                return "a pseudo-header in the trailers"
            problem = _field_problem(name.octets, value)
            if problem:
                return problem
        return None

    def _failure(self, error: BlockTooLarge | MalformedBlock) -> ConnectionFailure:
        if isinstance(error, BlockTooLarge):
            limit = f"header lists of {self._max_bytes * HARD_FACTOR} bytes (max_header_bytes)"
            return ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, f"too many {limit}")
        text = f"an invalid HPACK header block: {error}"
        return ConnectionFailure(ErrorCode.COMPRESSION_ERROR, text)

    def _make_kind(
        self, found: Sequence[Field], tokens: tuple[str, ...], size: int
    ) -> RequestKind[R]:
        too_large = size > self._max_bytes
        keeps = not too_large and sum(map(len, tokens)) <= _MAX_KIND_BYTES
        shape = _SHAPES.get(tokens)
        if shape is None:
            shape = _Shape(found, tokens)
            if keeps and shape.problem is None:
                _SHAPES.keep(tokens, shape)
        kind: RequestKind[R] = RequestKind(shape, too_large=too_large)
        if kind.problem is None:
            kind.route = self._router(kind)
            if keeps:
                self._kinds.keep(shape.tokens, kind)
        return kind

    def _note(self, block: bytes, head: Head[R]) -> None:
        """Record a block; cache its head if the block was received before."""
        if len(block) > _MAX_BLOCK_BYTES or sum(map(len, head.values)) > _MAX_BLOCK_LIST_BYTES:
            return
        if block not in self.seen:
            if self._once >= _MAX_BLOCKS:
                # None of the recorded blocks was repeated, so pause recording.
                self._rest = _BLOCKS_OF_REST
                self._forget_once()
            self.seen[block] = None
            self._once += 1
        elif head.problem is None:
            self._forget_once()
            if len(self.seen) >= _MAX_BLOCKS:
                self.seen.clear()
                self._dependent.clear()
            self.seen[block] = head
            if self._decoder.refers:
                self._dependent.append(block)

    def _forget_once(self) -> None:
        for block in [block for block, head in self.seen.items() if head is None]:
            del self.seen[block]
        self._once = 0

    def _drop_dependent(self) -> None:
        """Evict the blocks that reference the dynamic table: their meaning may have changed."""
        for block in self._dependent:
            del self.seen[block]
        self._dependent.clear()


def _problem(found: Iterable[Field]) -> str | None:
    """Return why a request is malformed (RFC 9113 8.2, 8.3), or None."""
    pseudo: dict[bytes, bytes] = {}
    regular = False
    for _, value, _, field_name in found:
        name = field_name.octets
        if name[:1] == b":":
            if regular:
                return "a pseudo-header after a regular header"
            if name in pseudo or name not in PSEUDO:
                return "an unknown or duplicate pseudo-header"
            if is_bad_value(value):
                return "a pseudo-header with an invalid character"
            pseudo[name] = value
        else:
            regular = True
            problem = _field_problem(name, value)
            if problem:
                return problem
    if not pseudo.get(b":path") or b":method" not in pseudo or b":scheme" not in pseudo:
        return "a request without :method, :scheme or :path"
    return (
        "CONNECT with :scheme and :path" if pseudo[b":method"] == b"CONNECT" else None
    )  # RFC 9113 8.5


def _field_problem(name: bytes, value: bytes) -> str | None:
    problem = name_problem(name)
    if problem is None and is_bad_value(value):
        problem = "a header value with an invalid character"
    if problem is None and name == b"te" and value != b"trailers":
        problem = "a connection-specific header"
    return problem


# --- encoding ----------------------------------------------------------------------------------


class HeaderWriter:
    """Encodes response header blocks without the dynamic table, and caches them."""

    def __init__(self) -> None:
        self._written: dict[tuple[tuple[str, str], ...], bytes] = {}

    def write(self, fields: Iterable[tuple[str, str]]) -> bytes:
        """Return the header block for the fields of a response."""
        key = tuple(fields)
        block = self._written.get(key)
        if block is None:
            block = encode_fields(key)
            if len(self._written) < _MAX_WRITTEN and len(block) <= _MAX_BLOCK_BYTES:
                self._written[key] = block
        return block


def encode_fields(fields: Iterable[tuple[str, str]]) -> bytes:
    """Encode fields as literals without indexing, which need no dynamic table (RFC 7541 6.2.2)."""
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
    """Encode a length as an integer with a 7-bit prefix (RFC 7541 5.1)."""
    if number < 127:
        return bytes((number,))
    number -= 127
    octets = bytearray((127,))
    while number >= 128:
        octets.append(number & 127 | 128)
        number >>= 7
    octets.append(number)
    return bytes(octets)
