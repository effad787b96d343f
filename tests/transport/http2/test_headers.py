"""Header blocks: caching of known blocks, malformed blocks, and the blocks that we write."""

import pytest
from hpack import Decoder, Encoder, HeaderTuple, NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.grpc.http2 import headers, hpack
from xlaserve.grpc.http2.errors import ConnectionFailure
from xlaserve.grpc.http2.frames import ErrorCode
from xlaserve.grpc.http2.header_fields import NAMES, Field
from xlaserve.grpc.http2.headers import Head, HeaderReader, HeaderWriter, RequestKind, encode_fields
from xlaserve.grpc.http2.timeout import read_timeout

PSEUDO = [(":method", "POST"), (":scheme", "http"), (":path", "/a"), (":authority", "b")]
LIMIT = 4096

VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF), max_size=300)


def literal(*fields: tuple[str, str]) -> bytes:
    """Encode fields without using the dynamic table."""
    return encode_fields(fields)


class Counter:
    """Counts the blocks that a reader decodes, and how often it asks the route for a kind."""

    def __init__(self) -> None:
        self.decoded = 0
        self.kinds: list[RequestKind[str]] = []

    def route(self, kind: RequestKind[str]) -> str:
        self.kinds.append(kind)
        return f"route {len(self.kinds)}"

    def reader(self, limit: int = LIMIT) -> HeaderReader[str]:
        return HeaderReader(limit, self.route)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    decode = hpack.Decoder.decode

    def count(self: hpack.Decoder, block: bytes) -> list[Field]:
        counter.decoded += 1
        return decode(self, block)

    monkeypatch.setattr(hpack.Decoder, "decode", count)
    return counter


# # --- identical blocks
# ----------------------------------------------------------------------------


def test_a_block_that_came_twice_is_not_decoded_again(counter: Counter) -> None:
    reader, block = counter.reader(), literal(*PSEUDO)
    heads = [reader.read(block) for _ in range(5)]

    assert 2 == counter.decoded
    assert heads[1] is heads[2] is heads[4]


def test_a_block_is_decoded_again_when_the_table_has_changed() -> None:
    """Its indexed fields refer to other entries then (RFC 7541, 2.3.2)."""
    encoder = Encoder()
    reader: HeaderReader[str] = HeaderReader(LIMIT)
    fields = [*PSEUDO, ("a", "1")]
    reader.read(encoder.encode(fields))
    indexed = encoder.encode(fields)
    for _ in range(3):
        assert "1" == reader.read(indexed).get("a")

    reader.read(encoder.encode([*PSEUDO, ("a", "2")]))

    assert "1" != reader.read(indexed).get("a")


def test_a_change_of_the_table_drops_only_what_refers_to_it(counter: Counter) -> None:
    encoder, reader = Encoder(), counter.reader()
    free, fields = literal(*PSEUDO), [*PSEUDO, ("a", "1")]
    reader.read(encoder.encode(fields))
    bound = encoder.encode(fields)
    for block in (free, free, bound, bound):
        reader.read(block)
    reader.read(encoder.encode([("b", "c"), *PSEUDO]))
    decoded = counter.decoded
    reader.read(free)

    assert decoded == counter.decoded
    reader.read(bound)

    assert decoded + 1 == counter.decoded


def test_a_block_that_writes_the_table_is_read_each_time() -> None:
    """It inserts an entry each time, which shifts older ones (RFC 7541, 2.3.3)."""
    reader: HeaderReader[str] = HeaderReader(LIMIT)
    block = b"\x83\x86\x84\x40\x01a\x01"
    for value in (b"1", b"2", b"2", b"2", b"3"):
        assert value.decode() == reader.read(block + value).get("a")

    added = [reader.read(b"\x83\x86\x84" + bytes((index,))).get("a") for index in range(0xBE, 0xC3)]
    assert ["3", "2", "2", "2", "1"] == added


def test_a_block_is_read_again_when_the_table_has_another_name_for_it() -> None:
    """A literal with an indexed name changes its meaning once an entry is inserted."""
    reader: HeaderReader[str] = HeaderReader(LIMIT)
    block = b"\x83\x86\x84\x0f\x2f\x01v"
    reader.read(b"\x83\x86\x84\x40\x01a\x01b")
    for _ in range(3):
        assert "v" == reader.read(block).get("a")
    reader.read(b"\x83\x86\x84\x40\x01c\x01d")

    assert [("c", "v")] == reader.read(block).fields[3:]


def test_a_change_of_the_tables_size_is_obeyed_each_time() -> None:
    """A block with a size update is never cached, even if a repetition changes nothing."""
    reader: HeaderReader[str] = HeaderReader(LIMIT)
    smaller, entry = b"\x20\x83\x86\x84", b"\x3f\xe1\x1f\x83\x86\x84\x40\x01a\x01b"
    for _ in range(3):
        reader.read(smaller)
        reader.read(entry)
        assert "b" == reader.read(b"\x83\x86\x84\xbe").get("a")

    reader.read(smaller)
    with pytest.raises(ConnectionFailure):
        reader.read(b"\x83\x86\x84\xbe")


def test_trailers_may_change_the_table_too() -> None:
    encoder = Encoder()
    reader: HeaderReader[str] = HeaderReader(LIMIT)
    fields = [*PSEUDO, ("a", "1")]
    reader.read(encoder.encode(fields))
    block = encoder.encode(fields)
    for _ in range(3):
        reader.read(block)
    assert reader.read_trailers(encoder.encode([("a", "2")])) is None

    assert "1" != reader.read(block).get("a")


def test_no_more_blocks_are_kept_than_the_limit() -> None:
    reader: HeaderReader[str] = HeaderReader(LIMIT)
    blocks = [literal(*PSEUDO, ("a", str(number))) for number in range(1000)]
    for block in blocks:
        for _ in range(2):
            reader.read(block)

    once = [head is None for head in reader.seen.values()]
    assert 64 >= sum(once)
    assert 64 >= len(once) - sum(once)
    assert reader.seen[blocks[-1]] is not None
    assert 1 == len(reader._kinds)


def test_connections_share_no_route_of_a_kind() -> None:
    """Parsed headers are shared, but not what a connection derives from them."""
    kinds: list[RequestKind[str]] = []

    def route(kind: RequestKind[str]) -> str:
        kinds.append(kind)
        return f"route {len(kinds)}"

    block = literal(*PSEUDO, ("a", "1"))
    heads = [HeaderReader[str](LIMIT, route).read(block) for _ in range(2)]

    assert kinds[0].names is kinds[1].names
    assert ["route 1", "route 2"] == [head.route for head in heads]


def test_what_connections_share_is_bounded() -> None:
    """A client that requests ever new paths cannot fill the cache."""
    for number in range(1000):
        reader: HeaderReader[str] = HeaderReader(LIMIT)
        path = f"/{number}" + "x" * (number % 400 if number < 999 else 3000)
        pseudo = [(name, path if name == ":path" else value) for name, value in PSEUDO]
        assert path == reader.read(literal(*pseudo)).path

    known = NAMES[b":path"]._known
    assert 256 >= len(headers._SHAPES) > 0
    assert 2048 >= max(sum(map(len, tokens)) for tokens in headers._SHAPES)
    assert 256 >= len(known) > 0
    assert 256 >= max(map(len, known))


# # --- similar blocks
# ------------------------------------------------------------------------------

NEVER, WITHOUT, INCREMENTAL = "never indexed", "without indexing", "with incremental indexing"


def encoded(encoder: Encoder, number: int, way: str, coded: bool) -> bytes:
    """Encode the headers of a request as real clients do; four values vary."""
    constant = [
        *PSEUDO,
        ("content-type", "application/grpc"),
        ("user-agent", "grpc-go/1.70"),
        ("te", "trailers"),
    ]
    varying = [
        ("grpc-timeout", f"{5000000 - number}u"),
        ("authorization", f"Bearer {number * 7919:032x}"),
        ("traceparent", f"00-{number:032x}-{number:016x}-01"),
        ("x-request-id", f"{number:036x}"),
    ]
    if way == WITHOUT:
        # The library cannot write literals without indexing.
        strings = (hpack_string(text, coded) for field in varying for text in field)
        block = b"".join(b"\0" + name + value for name, value in zip(strings, strings, strict=True))
        return encoder.encode(constant, huffman=coded) + block
    kind = NeverIndexedHeaderTuple if way == NEVER else HeaderTuple
    return encoder.encode([*constant, *(kind(*field) for field in varying)], huffman=coded)


def hpack_string(text: str, coded: bool) -> bytes:
    octets = Encoder().huffman_coder.encode(text.encode()) if coded else text.encode()
    return bytes((len(octets) | coded << 7,)) + octets


@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("way", [NEVER, WITHOUT, INCREMENTAL])
def test_headers_that_vary_are_of_one_kind(counter: Counter, way: str, coded: bool) -> None:
    """Counted, not timed: the route is asked once, and every value is read each time."""
    encoder, reader = Encoder(), counter.reader()
    heads = [(n, reader.read(encoded(encoder, n, way, coded))) for n in range(500)]

    assert 1 == len(counter.kinds)
    assert {"route 1"} == {head.route for _, head in heads}
    for number, head in heads:
        assert f"00-{number:032x}-{number:016x}-01" == head.get("traceparent")
        assert f"Bearer {number * 7919:032x}" == head.get("authorization")
        assert (5000000 - number) * 1e-6 == head.timeout


def test_what_was_sent_as_a_literal_is_of_the_kind_of_what_is_indexed(counter: Counter) -> None:
    reader = counter.reader()
    encoder = Encoder()
    fields = [*PSEUDO, ("authorization", "a"), ("content-type", "application/grpc")]
    for block in (literal(*fields), encoder.encode(fields), encoder.encode(fields)):
        assert fields == reader.read(block).fields

    assert 1 == len(counter.kinds)


GOOD = [*PSEUDO, ("content-type", "a"), ("content-length", "1"), ("te", "trailers"), ("a", "b")]


def but(name: str, value: str) -> list[tuple[str, str]]:
    """Return the valid headers with one value replaced."""
    return [(one, value if one == name else old) for one, old in GOOD]


@pytest.mark.parametrize(
    "other",
    [
        but(":path", "/b"),
        but(":method", "GET"),
        but("content-type", "b"),
        but("content-length", "2"),
        GOOD[:-1],
        [*GOOD, ("a", "b")],
        [*GOOD[:-1], ("b", "b")],
        [GOOD[1], GOOD[0], *GOOD[2:]],
        [*GOOD[:-2], GOOD[-1], GOOD[-2]],
    ],
)
def test_what_decides_makes_another_kind(counter: Counter, other: list[tuple[str, str]]) -> None:
    reader = counter.reader()

    assert "route 1" == reader.read(literal(*GOOD)).route
    assert "route 2" == reader.read(literal(*other)).route
    assert other == reader.read(literal(*other)).fields
    assert "route 1" == reader.read(literal(*but("a", "c"))).route


@pytest.mark.parametrize(
    "bad",
    [
        ("a", "b\n"),
        ("a", "\r"),
        ("a", "\0b"),
        ("\na", "b"),
        ("content-length", "x"),
        ("content-length", "2"),
        (":path", "/b"),
        ("te", "gzip"),
        ("connection", "a"),
        # Encoded like the token of the valid field.
        ("content-type\nc", "a"),
    ],
)
@pytest.mark.parametrize("first", [0x00, 0x40])
def test_no_malformed_request_is_of_a_known_kind(
    counter: Counter, bad: tuple[str, str], first: int
) -> None:
    """Neither as a literal, nor by an index into the current table."""
    reader = counter.reader()
    good = [*PSEUDO, ("content-length", "1"), ("a", "b")]
    for more in (("a", "b"), ("content-type", "c")):
        assert reader.read(literal(*good[:-1], more)).problem is None
    block = literal(*good[:-1]) + bytes((first,)) + literal(bad)[1:]

    assert reader.read(block).problem
    if first:
        assert reader.read(literal(*good[:-1]) + b"\xbe").problem
    assert 2 == len(counter.kinds)


def test_a_check_sees_every_request() -> None:
    """An invalid value is detected however well-known the other headers are."""
    asked: list[str | None] = []

    def check(head: Head[str]) -> str | None:
        asked.append(head.get("a"))
        return "refused" if head.get("a") == "bad" else None

    def route(kind: RequestKind[str]) -> str:
        kind.check = check
        return "route"

    reader: HeaderReader[str] = HeaderReader(LIMIT, route)
    found = [reader.read(literal(*PSEUDO, ("a", value))).route for value in ("1", "bad", "2")]

    assert ["route", "refused", "route"] == found
    assert ["1", "bad", "2"] == asked


@pytest.mark.parametrize("way", ["literal", "indexed"])
def test_a_check_may_leave_out_what_has_time_enough(way: str) -> None:
    """A check of the timeout alone is skipped while more than `unchecked_seconds` remain."""
    asked: list[float | None] = []

    def route(kind: RequestKind[str]) -> str:
        kind.check = lambda head: asked.append(head.timeout)
        kind.unchecked_seconds = 0.5
        return "route"

    reader: HeaderReader[str] = HeaderReader(LIMIT, route)
    encoder = Encoder()
    for value in ("1S", "2S", "500m", "499m", "3S", "x", "1m"):
        fields = (*PSEUDO, ("grpc-timeout", value))
        reader.read(literal(*fields) if way == "literal" else encoder.encode(fields))

    assert [0.499, None, 0.001] == asked


def test_a_kind_keeps_no_value_that_varies() -> None:
    """A client cannot fill the cache with varying values."""
    kinds: list[RequestKind[str]] = []
    reader: HeaderReader[str] = HeaderReader(LIMIT, kinds.append)
    reader.read(literal(*PSEUDO, ("authorization", "secret"), ("te", "trailers")))
    (kind,) = kinds

    assert ("POST", "/a", "trailers") == (kind.method, kind.path, kind.get("te"))
    assert kind.get("authorization") is None
    assert "secret" not in str([getattr(kind, name) for name in RequestKind.__slots__])


def test_headers_over_the_limit_are_of_no_known_kind(counter: Counter) -> None:
    reader = counter.reader()
    sizes = [10, LIMIT, 10]
    heads = [reader.read(literal(*PSEUDO, ("a", "b" * size))) for size in sizes]

    assert [False, True, False] == [head.too_large for head in heads]
    assert heads[0].kind is heads[2].kind


# # --- request heads
# -------------------------------------------------------------------------------


def head_of(*fields: tuple[str, str]) -> Head[str]:
    return HeaderReader[str](LIMIT).read(literal(*PSEUDO, *fields))


def test_a_head_has_its_values() -> None:
    head = head_of(("a", "1"), ("b", "\xe9"), ("a", "2"))

    assert [*PSEUDO, ("a", "1"), ("b", "\xe9"), ("a", "2")] == head.fields
    assert ("\xe9", None) == (head.get("b"), head.get("c"))
    assert ("1, 2", ["1", "2"], []) == (head.get("a"), head.getall("a"), head.getall("c"))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("1H", 3600),
        ("2M", 120),
        ("3S", 3),
        ("250m", 0.25),
        ("12345678u", 12.345678),
        ("1n", 1e-9),
        ("0S", 0),
        ("123456789u", None),
        ("S", None),
        ("", None),
        ("1", None),
        ("1s", None),
        ("-1S", None),
        ("+1S", None),
        ("1_0S", None),
        (" 1S", None),
        ("1S ", None),
        ("\xb2S", None),
    ],
)
def test_a_timeout_is_digits_and_a_unit(value: str, seconds: float | None) -> None:
    """gRPC over HTTP/2, Timeout."""
    assert seconds == read_timeout(value.encode("latin-1"))
    assert seconds == head_of(("grpc-timeout", value)).timeout


def test_the_shortest_of_several_timeouts_counts() -> None:
    times = [("grpc-timeout", value) for value in ("9S", "x", "3S", "4S")]

    assert 3 == head_of(*times).timeout
    assert head_of(*times[1:2]).timeout is None
    assert head_of().timeout is None


# --- what is malformed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (PSEUDO[1:], "without :method"),
        ([*PSEUDO[:2], (":path", "")], "without :method"),
        ([*PSEUDO, PSEUDO[0]], "an unknown or duplicate pseudo-header"),
        ([*PSEUDO, (":status", "200")], "unknown"),
        ([("a", "b"), *PSEUDO], "a pseudo-header after a regular header"),
        ([*PSEUDO, ("Upper", "b")], "uppercase"),
        ([*PSEUDO, ("a b", "c")], "uppercase"),
        ([*PSEUDO, ("", "c")], "uppercase"),
        ([*PSEUDO, ("a", "b\r\nc")], "invalid character"),
        ([*PSEUDO, ("a", "b\0")], "invalid character"),
        ([*PSEUDO[:2], (":path", "/\n"), (":authority", "b")], "invalid character"),
        ([*PSEUDO, ("connection", "close")], "a connection-specific header"),
        ([*PSEUDO, ("transfer-encoding", "chunked")], "a connection-specific header"),
        ([*PSEUDO, ("te", "gzip")], "a connection-specific header"),
        ([*PSEUDO, ("content-length", "-1")], "content-length"),
        ([*PSEUDO, ("content-length", "1"), ("content-length", "2")], "content-length"),
    ],
)
def test_a_malformed_request_says_why(fields: list[tuple[str, str]], problem: str) -> None:
    reader: HeaderReader[None] = HeaderReader(LIMIT)
    for _ in range(3):
        assert problem in (reader.read(literal(*fields)).problem or "")


def test_a_list_over_the_limit_is_read_so_that_it_can_be_refused() -> None:
    reader: HeaderReader[None] = HeaderReader(LIMIT)

    assert reader.read(literal(*PSEUDO, ("a", "b" * LIMIT))).too_large
    assert not reader.read(literal(*PSEUDO, ("a", "b" * 100))).too_large


def test_a_list_far_over_the_limit_ends_the_connection() -> None:
    reader: HeaderReader[None] = HeaderReader(LIMIT)
    with pytest.raises(ConnectionFailure) as failure:
        reader.read(literal(*PSEUDO, ("a", "b" * LIMIT * 4)))

    assert ErrorCode.ENHANCE_YOUR_CALM is failure.value.code


@pytest.mark.parametrize("block", [b"\xff\xff\xff", b"\x00\x05ab", b"\x80", b"\x00\x01a", b"\xc0"])
def test_what_is_not_hpack_ends_the_connection(block: bytes) -> None:
    reader: HeaderReader[None] = HeaderReader(LIMIT)
    with pytest.raises(ConnectionFailure) as failure:
        reader.read(block)

    assert ErrorCode.COMPRESSION_ERROR is failure.value.code


@given(st.lists(st.tuples(st.sampled_from([":status", "a", "grpc-message", "x" * 200]), VALUES)))
def test_what_is_written_reads_the_same(fields: list[tuple[str, str]]) -> None:
    read = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in _decode(fields)]

    assert fields == read


def _decode(fields: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return list(Decoder(1 << 24).decode(HeaderWriter().write(fields), raw=True))


@pytest.mark.parametrize("by_layout", [True, False])
@pytest.mark.parametrize(("more", "too_large"), [(-1, False), (0, False), (1, True)])
def test_a_list_of_the_limit_is_taken_and_one_more_byte_is_not(
    more: int, too_large: bool, by_layout: bool, counter: Counter
) -> None:
    """RFC 9113 6.5.2: names, values, and 32 bytes per field; also on the fast path."""
    size = sum(len(name) + len(value) + 32 for name, value in PSEUDO) + 33
    reader = counter.reader(1000)
    if by_layout:
        for number in range(8):
            assert not reader.read(literal(*PSEUDO, ("a", str(number)))).too_large
    head = reader.read(literal(*PSEUDO, ("a", "v" * (1000 - size + more))))

    assert too_large is head.too_large
    assert 1000 - size + more == len(head.get("a") or "")
