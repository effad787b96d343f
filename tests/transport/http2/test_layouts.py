"""Blocks read by their layout agree with the hpack library in fields and dynamic table."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

import hpack
import pytest
from hpack import HeaderTuple, NeverIndexedHeaderTuple
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hpack_pair import LayoutPair, string

from xlaserve.grpc.http2.dynamic_table import DynamicTable

_EXAMPLES = int(os.environ.get("HPACK_BLOCKS", "150"))
"""Number of sequences that each comparison with the reference draws."""

CONSTANT = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a"),
    (b":authority", b"b"),
    (b"te", b"trailers"),
]


class Writer:
    """Encodes blocks like a client whose encoder has a dynamic table."""

    def __init__(self) -> None:
        self.encoder = hpack.Encoder()

    def block(self, *fields: "tuple[bytes, bytes, str]", coded: bool = False) -> bytes:
        """Encode fields, each with incremental indexing, never indexed, or without indexing."""
        octets = b""
        for name, value, way in fields:
            if way == "without":
                octets += b"\0" + string(name, coded) + string(value, coded)
            else:
                kind = NeverIndexedHeaderTuple if way == "never" else HeaderTuple
                octets += self.encoder.encode([kind(name, value)], huffman=coded)
        return octets

    def request(self, *values: bytes, way: str, coded: bool = False) -> bytes:
        """Encode a request with these values for its own headers."""
        own = [(b"x-%d" % number, value, way) for number, value in enumerate(values)]
        return self.block(*((*field, "indexed") for field in CONSTANT), *own, coded=coded)


WAYS = ["indexed", "never", "without"]


@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("long", [0, 300])
def test_blocks_of_one_layout_are_read_by_it(way: str, coded: bool, long: int) -> None:
    """Except for the first blocks, and those that re-insert evicted entries (4.4)."""
    writer, pair = Writer(), LayoutPair()
    for n in range(100):
        values = (b"%du" % (10**n % 99_999_937), b"00-%032x" % n, b"%x" % n * (1 + long))
        (lines,) = pair.compare(writer.request(*values, way=way, coded=coded))
        assert [*CONSTANT, *((b"x-%d" % at, value) for at, value in enumerate(values))] == lines

    assert pair.read >= (97 if way != "indexed" else 50 if long else 70)


# # --- arbitrary blocks
# -----------------------------------------------------------------------------

Fields: TypeAlias = list[tuple[bytes, str]]

NAMES = st.sampled_from(
    [b":path", b":authority", b"te", b"grpc-timeout", b"traceparent", b"authorization", b"a"]
)
VALUES = (
    st.sampled_from([b"", b"trailers", b"1", b"a\nb", b"\0", b"\r", b"v" * 127, b"w" * 1300])
    | st.binary(max_size=20)
    | st.text(st.sampled_from("0123456789abcdef-"), max_size=60).map(str.encode)
)


@dataclass(frozen=True)
class Turn:
    """One block: its shape and values, or random octets."""

    shape: int
    values: list[bytes]
    coded: bool
    table: int | None
    octets: bytes


SHAPES = st.lists(
    st.lists(st.tuples(NAMES, st.sampled_from(WAYS)), max_size=6), min_size=1, max_size=2
)
ODD = st.sampled_from([b"\x20", b"\x3f\xe1\x1f", b"\xbe", b"\x0f\x2f\x01v", b"\x40\x01n\x01v"])
TURNS = st.lists(
    st.builds(
        Turn,
        st.sampled_from([0, 0, 0, 1]),
        st.lists(VALUES, min_size=6, max_size=6),
        st.sampled_from([True, False]),
        st.sampled_from([None] * 9 + [0, 200, 4096]),
        st.sampled_from([b""] * 12) | ODD,
    ),
    min_size=3,
    max_size=30,
)


@settings(max_examples=_EXAMPLES, deadline=None)
@given(SHAPES, TURNS)
def test_any_blocks_are_read_as_by_the_reference(shapes: list[Fields], turns: list[Turn]) -> None:
    """Fields and table agree up to the first refused block."""
    writer, pair = Writer(), LayoutPair()
    for turn in turns:
        shape = shapes[turn.shape % len(shapes)]
        if turn.table is not None:
            writer.encoder.header_table_size = turn.table
        fields = [
            (name, value, way) for (name, way), value in zip(shape, turn.values, strict=False)
        ]
        block = b"\x83\x86" + writer.block(*fields, coded=turn.coded)
        # The reference encoder does not know these entries: its references are arbitrary
        # afterwards.
        if any(isinstance(lines, str) for lines in pair.compare(turn.octets, block)):
            break


@settings(max_examples=_EXAMPLES, deadline=None)
@given(
    st.sampled_from(WAYS),
    st.booleans(),
    st.integers(0, 1 << 16),
    st.integers(0, 255),
    st.integers(0, 1 << 16) | st.none(),
)
def test_a_block_of_a_layout_that_was_changed_ends_as_with_the_reference(
    way: str, coded: bool, place: int, octet: int, cut: int | None
) -> None:
    writer, pair = Writer(), LayoutPair()
    blocks = [
        bytearray(writer.request(b"%06d" % n, b"a" * (n % 3) + b"b" * 20, way=way, coded=coded))
        for n in range(6)
    ]
    last = blocks[-2]
    last[place % len(last)] = octet
    if cut is not None:
        del last[cut % len(last) + 1 :]

    pair.compare(*map(bytes, blocks))
    assert pair.read


# # --- raw blocks whose references change their meaning
# ---------------------------------------------

Template: TypeAlias = Callable[[], bytes]
"""Writes a block with new values on each call."""


def template(random: Random) -> Template:
    """Make a random block: references followed by literals of any kind and name."""
    references = bytes(random.choices((0x82, 0x83, 0x84, 0xBE, 0xBF, 0xC0), k=random.randint(0, 3)))
    literals = [
        random.choice((b"\x40\x01a", b"\x40\x01b", b"\0\x01a", b"\x10\x01c", b"\x41", b"\x04"))
        if random.random() < 0.7
        # The name of an entry: 62 to 64.
        else random.choice((b"\x7e", b"\x7f\0", b"\x7f\x01", b"\x0f\x2f", b"\x0f\x30", b"\x1f\x31"))
        for _ in range(random.randint(1, 3))
    ]
    fixed = [random.random() < 0.2 for _ in literals]
    tail = random.choice((b"", b"", b"", b"\x84", b"\xbe", b"\x87\x84"))
    sizes = (0, 1, 1, 2, 5, *random.choices((0, 126, 127, 128, 900, 2000, 4030, 4100), k=2))

    def write() -> bytes:
        """Write a block of these literals, some with a constant value."""
        octets = references
        if random.random() < 0.1:
            octets = bytes(random.choices((0x82, 0x83, 0xBE, 0xBF, 0xC0, 0xC1), k=len(references)))
        for opener, is_fixed in zip(literals, fixed, strict=True):
            value = b"v" if is_fixed else b"%c" % random.choice(b"wxy01") * random.choice(sizes)
            octets += opener + string(value, random.random() < 0.3)
        return octets + tail

    return write


@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_a_few_shapes_by_turns_are_read_as_by_the_reference(seed: int) -> None:
    """For any references, and any evictions in between."""
    random = Random(seed)
    read = 0
    for _ in range(40):
        pair = LayoutPair()
        shapes = [template(random) for _ in range(random.randint(1, 3))]
        pair.compare(b"\x40\x01a\x01v\x40\x01b\x01w\x40\x01c\x01x")
        for number in range(25):
            again = random.random() < 0.8
            write = shapes[number % len(shapes)] if again else random.choice(shapes)
            if any(isinstance(lines, str) for lines in pair.compare(write())):
                break
        read += pair.read

    assert read > 60


@pytest.mark.parametrize("added", [1, 2, 3])
@pytest.mark.parametrize("varies", [True, False])
def test_what_references_mean_is_not_looked_up_for_each_of_two_layouts_by_turns(
    added: int, varies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block inserts entries, and the other refers to all of them."""
    looked_up = []
    newest = DynamicTable.newest

    def noting(table: DynamicTable, count: int) -> list[object]:
        looked_up.append(count)
        return list(newest(table, count))

    pair = LayoutPair()
    adds = b"\x83" + b"\x40\x01a\x01%c" * added + b"\0\x01c\x01%c"
    refers = b"\x83" + bytes(range(0xBE, 0xBE + added)) + b"\0\x01d\x01%c"

    def blocks(number: int) -> list[bytes]:
        value = ord("a") + number % 20 * varies
        return [adds % ((value,) * added + (ord("a") + number,)), refers % (ord("a") + number)]

    for number in range(10):
        pair.compare(*blocks(number))
    monkeypatch.setattr(DynamicTable, "newest", noting)
    for block in (block for number in range(10, 20) for block in blocks(number)):
        values = pair.layouts.read(block)
        lines = pair.reference_of(block)
        assert values is not None
        assert not isinstance(lines, str)
        assert [value for _, value in lines] == values.all()

    assert [] == looked_up


# # --- single rules
# ---------------------------------------------------------------------------------


def never(value: bytes) -> bytes:
    return b"\x83\x86\x10\x01a" + string(value, coded=False)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(never(b"1\0"), id="a value that is malformed"),
        pytest.param(never(b"12")[:-1], id="a value that is cut off"),
        pytest.param(never(b"12") + b"\x84", id="a field behind it"),
        pytest.param(never(b"12") + b"\x20", id="a change of the table's size behind it"),
        pytest.param(never(b"12").replace(b"\x86", b"\x87"), id="another reference"),
        pytest.param(never(b"12").replace(b"a", b"b"), id="another name"),
        pytest.param(never(b"12").replace(b"\x10", b"\x40"), id="another way to write it"),
        pytest.param(b"\x83\x86\x10\x01a\x81\x00", id="padding that is none"),
        pytest.param(b"\x83\x86\x10\x01a", id="no value"),
        pytest.param(never(b"v" * 0xFFFF), id="more than the limit"),
    ],
)
def test_what_is_not_of_the_layout_is_decoded(block: bytes) -> None:
    pair = LayoutPair(1 << 16)
    pair.compare(*(never(b"%d" % n) for n in range(10)))
    read = pair.read
    pair.compare(block)

    assert 8 == read == pair.read


def test_a_name_is_looked_up_anew_when_the_table_has_changed() -> None:
    """The index is the same, but refers to another name (2.3.3)."""
    named = b"\x83\x0f\x2f\x01"
    pair = LayoutPair()
    pair.compare(b"\x40\x01a\x01v", *(named + b"%d" % n for n in range(5)))
    assert 4 == pair.read
    outcomes = pair.compare(b"\x40\x01b\x01v", named + b"6")

    assert [(b":method", b"POST"), (b"b", b"6")] == outcomes[-1]
    assert 4 == pair.read


def test_a_reference_is_looked_up_anew_when_the_table_has_changed() -> None:
    pair = LayoutPair()
    pair.compare(b"\x40\x01a\x01v", *(b"\xbe\x00\x01x\x01%d" % n for n in range(5)))
    outcomes = pair.compare(b"\x40\x01a\x01w", b"\xbe\x00\x01x\x016")

    assert [(b"a", b"w"), (b"x", b"6")] == outcomes[-1]
    assert 5 == pair.read


def test_a_reference_is_looked_up_anew_behind_blocks_of_another_layout() -> None:
    """Its meaning is cached only for the layouts that have preceded it."""
    pair = LayoutPair()
    refers = b"\xbe\x00\x01x\x01%d"
    for number in range(10):
        pair.compare(b"\x83\x40\x01a\x01%d" % number, refers % number)
    read = pair.read
    pair.compare(b"\x83\x40\x01a\x01b", refers % 1)
    assert 2 == pair.read - read
    outcomes = pair.compare(
        *(b"\x83\x40\x01c\x01%d" % (number % 10) for number in range(40)), refers % 1
    )

    assert [(b"c", b"9"), (b"x", b"1")] == outcomes[-1]


def test_a_reference_ends_with_its_entry() -> None:
    """Its index grows with each block until the entry is evicted (2.3.3, 4.4)."""
    pair, add = LayoutPair(), b"\x40\x01b"
    pair.compare(b"\x40\x01a\x01v", *(bytes((n,)) + add + b"\x01v" for n in range(0xBE, 0xC8)))
    assert 9 == pair.read
    pair.compare(b"\xc8" + add + string(b"w" * 4050, coded=False))

    assert ["malformed"] == pair.compare(b"\xc9" + add + b"\x01v")


def test_a_reference_of_more_than_an_octet_is_none() -> None:
    """After 0xfe an index takes two octets (5.1), and 0xfe then means another entry."""
    pair, add = LayoutPair(), b"\x40\x01b\x01"
    pair.compare(b"\x40\x01a\x01v", *(bytes((n,)) + add + b"v" for n in range(0xBE, 0xFF)))
    outcomes = pair.compare(b"\xfe" + add + b"v", b"\xff\x01" + add + b"v")

    assert [(b"b", b"v"), (b"a", b"v")] == [lines[0] for lines in outcomes]


def test_an_index_of_two_octets_is_not_a_reference_and_an_opener() -> None:
    pair = LayoutPair()
    pair.compare(*(b"\x40\x01b\x01v" for _ in range(70)))
    pair.compare(*(b"\xbe\x00\x01x\x01%d" % n for n in range(4)), b"\x40\x01b\x01v")
    authority = b"w" + b"v" * ord("w")
    outcomes = pair.compare(b"\xff\x00\x01x" + authority)

    assert [[(b"b", b"v"), (b":authority", authority)]] == outcomes


def test_the_end_of_a_block_is_compared_too() -> None:
    pair = LayoutPair()
    pair.compare(*(b"\x83\x00\x01x\x01%d\x84" % n for n in range(4)))
    outcomes = pair.compare(b"\x83\x00\x01x\x014\x85")

    assert 2 == pair.read
    assert (b":path", b"/index.html") == outcomes[0][-1]


NAMED = b"\x83\x7e\x01"
"""Inserts an entry with the name of the newest one."""


def test_a_name_ends_with_its_entry() -> None:
    """An entry larger than the table empties it (4.4)."""
    pair = LayoutPair()
    pair.compare(b"\x40\x01a\x01v", *(NAMED + b"%d" % n for n in range(4)))
    assert 3 == pair.read
    pair.compare(NAMED[:-1] + string(b"v" * 5000, coded=False))

    assert ["malformed"] == pair.compare(NAMED + b"v")


def test_a_name_is_that_of_another_entry_once_some_were_added() -> None:
    """With two alternating insertions, the index of the older one moves to the newer one."""
    pair = LayoutPair()
    outcomes = pair.compare(
        b"\x40\x01a\x01v\x40\x01b\x01v", *(b"\x83\x7f\x00\x01%d" % n for n in range(8))
    )

    assert [b"a", b"b"] * 4 == [lines[-1][0] for lines in outcomes[1:]]


@pytest.mark.parametrize(
    ("first", "block"),
    [
        pytest.param(b"\x40\x01a\x01v", b"\x83\x40\x01x%s\x7f\x00\x01v", id="an older one"),
        pytest.param(b"", b"\x83\x40\x01a%s\x7e\x01v", id="one of the block itself"),
    ],
)
def test_a_name_ends_when_the_block_itself_evicts_its_entry(first: bytes, block: bytes) -> None:
    pair = LayoutPair()
    pair.compare(first, *(block % b"\x01w" for _ in range(6)))
    (outcome,) = pair.compare(block % string(b"w" * 5000, coded=False))

    assert "malformed" == outcome


def test_a_name_ends_when_its_entry_has_become_large() -> None:
    """How much a block of the layout may insert depends on the current table."""
    pair = LayoutPair()
    block = b"\x83\x40\x01x%s\x7f\x00\x01v"
    pair.compare(b"\x40\x01a\x01v", *(block % b"\x01w" for _ in range(6)))
    assert pair.read
    pair.compare(b"\x40\x01a" + string(b"v" * 3000, coded=False))

    assert ["malformed"] == pair.compare(block % string(b"w" * 1100, coded=False))


def test_layouts_that_are_of_no_use_are_learned_ever_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Learning costs as much as decoding: a client must not trigger it for each block."""
    pair, learned = LayoutPair(), []
    for number in range(300):
        pair.compare(b"\x00" + string(b"n%d" % number, coded=False) + b"\x01v")
        if pair.layouts.layout not in learned:
            learned.append(pair.layouts.layout)

    assert 0 == pair.read
    assert 2 < len(learned) < 12


def test_two_layouts_by_turns_are_both_read() -> None:
    pair = LayoutPair()
    blocks = [b"\x83\x00\x01%s\x01v" % name for name in (b"a", b"b")]
    pair.compare(*blocks * 4)
    read = pair.read
    pair.compare(*blocks * 50)

    assert 100 == pair.read - read


def test_a_third_layout_takes_the_place_of_the_older_one() -> None:
    """As when a proxy sends another client's requests on the same connection."""
    pair = LayoutPair()
    for name in (b"a", b"b", b"c"):
        pair.compare(*[b"\x83\x00\x01%s\x01v" % name] * 20)
    read = pair.read
    pair.compare(b"\x83\x00\x01b\x01v", b"\x83\x00\x01c\x01v", b"\x83\x00\x01a\x01v")

    assert 2 == pair.read - read
