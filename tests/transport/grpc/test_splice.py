"""Replacing an id in a serialized message, compared with google's protobuf."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from random import Random
from typing import Any, TypeAlias

import betterproto
import pytest
from google.protobuf.message import DecodeError, Message
from support.mutation import mutate, pieces, random_message, varint
from support.protobuf import DISPUTED, Everything, Google, contract_messages

from xlaserve.errors import InvalidSettings
from xlaserve.errors.message import MalformedMessage, TooManyFields
from xlaserve.grpc.protobuf.splice import (
    MAX_PATH,
    SPAN_COST,
    VALUE_BYTES,
    InjectionPath,
    splice_string,
)
from xlaserve_proto import inference

Path: TypeAlias = tuple[int, ...]

MAX_FIELDS = 100_000
ID = "my-model__isvc-0123456789"


def splice(message: Any, path: Path, value: str | bytes, *, max_fields: int = MAX_FIELDS) -> Any:
    return splice_string(message, InjectionPath(path), value, max_fields=max_fields, max_depth=100)


def tag(number: int, wire: int) -> bytes:
    return varint(number << 3 | wire)


def sized(number: int, body: str | bytes, padding: int = 0) -> bytes:
    octets = body.encode() if isinstance(body, str) else body
    return tag(number, 2) + varint(len(octets), padding) + octets


# # --- results -----------------------------------------------------------------------------------

CHILD = 17
"""The field Everything.child, which is itself an Everything."""
CHILDREN = 37
"""The same as a repeated field."""
TEXT = 14

SPLICED: dict[str, tuple[bytes, Path, str, bytes]] = {
    "a request of the mesh": (
        bytes.fromhex("0a02766d1201311a01373a020102"),
        (1,),
        ID,
        sized(1, ID) + bytes.fromhex("1201311a01373a020102"),
    ),
    "a request of the mesh, without the field": (
        bytes.fromhex("1a01373a020102"),
        (1,),
        "X",
        bytes.fromhex("1a01373a0201020a0158"),
    ),
    "the empty message": (b"", (TEXT,), "a", sized(TEXT, "a")),
    "the empty message, nested": (
        b"",
        (CHILD, CHILDREN, TEXT),
        "a",
        sized(CHILD, sized(CHILDREN, sized(TEXT, "a"))),
    ),
    "an empty value": (sized(TEXT, "a"), (TEXT,), "", sized(TEXT, "")),
    "every occurrence of the field": (
        sized(TEXT, "a") + tag(2, 0) + b"\1" + sized(TEXT, "") + sized(TEXT, "id"),
        (TEXT,),
        "id",
        sized(TEXT, "id") + tag(2, 0) + b"\1" + sized(TEXT, "id") + sized(TEXT, "id"),
    ),
    "the field in every occurrence of its message": (
        sized(CHILD, sized(TEXT, "a")) + sized(CHILD, sized(TEXT, "b")),
        (CHILD, TEXT),
        "id",
        sized(CHILD, sized(TEXT, "id")) * 2,
    ),
    "messages with the field and without": (
        sized(CHILDREN, b"") + sized(CHILDREN, sized(TEXT, "a")) + sized(CHILDREN, b"\x08\1"),
        (CHILDREN, TEXT),
        "id",
        sized(CHILDREN, sized(TEXT, "id")) * 2 + sized(CHILDREN, b"\x08\1" + sized(TEXT, "id")),
    ),
    "a field that is behind a message without it": (
        sized(CHILD, sized(CHILD, b"")) + sized(CHILD, sized(CHILD, sized(TEXT, "a"))),
        (CHILD, CHILD, TEXT),
        "id",
        sized(CHILD, sized(CHILD, sized(TEXT, "id"))) * 2,
    ),
    "the number elsewhere in the message": (
        sized(TEXT, "a") + sized(CHILDREN, sized(TEXT, "b")) + sized(CHILD, b""),
        (CHILD, TEXT),
        "id",
        sized(TEXT, "a") + sized(CHILDREN, sized(TEXT, "b")) + sized(CHILD, sized(TEXT, "id")),
    ),
    "the field as a varint": (
        tag(TEXT, 0) + b"\5",
        (TEXT,),
        "id",
        tag(TEXT, 0) + b"\5" + sized(TEXT, "id"),
    ),
    "the field as a group": (
        tag(TEXT, 3) + sized(TEXT, "a") + tag(TEXT, 4),
        (TEXT,),
        "id",
        tag(TEXT, 3) + sized(TEXT, "a") + tag(TEXT, 4) + sized(TEXT, "id"),
    ),
    "its message as four bytes": (
        tag(CHILD, 5) + bytes(4),
        (CHILD, TEXT),
        "id",
        tag(CHILD, 5) + bytes(4) + sized(CHILD, sized(TEXT, "id")),
    ),
    "an unknown field in its message": (
        sized(CHILD, sized(99, b"\xff") + sized(TEXT, "a") + tag(99, 3) + tag(99, 4)),
        (CHILD, TEXT),
        "id",
        sized(CHILD, sized(99, b"\xff") + sized(TEXT, "id") + tag(99, 3) + tag(99, 4)),
    ),
    "a field that is not UTF-8": (sized(TEXT, b"\xff"), (TEXT,), "é", sized(TEXT, "é")),
    "sizes that need another byte": (
        sized(CHILD, sized(CHILD, sized(TEXT, "a" * 123))),
        (CHILD, CHILD, TEXT),
        "b" * 124,
        sized(CHILD, sized(CHILD, sized(TEXT, "b" * 124))),
    ),
    "sizes that need a byte less": (
        sized(CHILD, sized(CHILD, sized(TEXT, "a" * 128))),
        (CHILD, CHILD, TEXT),
        "b",
        sized(CHILD, sized(CHILD, sized(TEXT, "b"))),
    ),
    "sizes that are written long": (
        sized(CHILD, sized(TEXT, "a", 4), 4),
        (CHILD, TEXT),
        "id",
        sized(CHILD, sized(TEXT, "id")),
    ),
    "tags that are written long": (
        varint(TEXT << 3 | 2, 3) + b"\1a",
        (TEXT,),
        "id",
        varint(TEXT << 3 | 2, 3) + b"\2id",
    ),
    "the largest number": (sized(2**29 - 1, "a"), (2**29 - 1,), "b", sized(2**29 - 1, "b")),
}


@pytest.mark.parametrize(("data", "path", "value", "expected"), SPLICED.values(), ids=SPLICED)
def test_value_stands_at_the_path(data: bytes, path: Path, value: str, expected: bytes) -> None:
    """In every occurrence, or appended if there is none; the other bytes stay unchanged."""
    assert expected == splice(data, path, value)
    assert expected == splice(memoryview(data), path, value.encode())


def test_parser_takes_the_value_however_often_the_field_is_there(google: Google) -> None:
    """A parser uses the last occurrence, while the mesh rewrites only the first."""
    sent = sized(1, ID) + sized(5, b"") + sized(1, "another")

    request: Any = google.named("inference.ModelInferRequest")

    assert "another" == request.FromString(sent).model_name
    assert ID == request.FromString(splice(sent, (1,), ID)).model_name


@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_message_that_says_so_already_is_returned_itself(kind: Any) -> None:
    nested = kind(sized(CHILD, sized(TEXT, ID)) * 2)
    flat = kind(sized(TEXT, ID) + b"\x08\1")

    assert nested is splice(nested, (CHILD, TEXT), ID)
    assert flat is splice(flat, (TEXT,), ID)


# # --- comparison with google's protobuf ---------------------------------------------------------

SHARDS = 10
MESSAGES = 1_000
"""Messages per shard."""
MUTATIONS = 10
"""Mutations per valid message; the valid message itself is the first case."""
SET, REFUSED = "set", "malformed to both"
ADDED, OFF_PATH = "set, with elements added", "malformed off the path"
VALUES = ("", "x", "é", ID, "a" * 123, "日" * 50, "b" * 17_000)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_splicing_is_decoding_setting_and_encoding(
    shard: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """What google accepts says, once it is spliced, what it says with the field set.

    One difference is known and counted: where a message that is no list comes in two parts, and
    one part lacks a list that is on the path, that part gets an element. The wire does not say
    whether the parts are elements themselves, each of which needs one.
    """
    random = Random(f"splice {shard}")
    cases = _cases()
    counts: Counter[str] = Counter()
    for _ in range(MESSAGES // MUTATIONS):
        google_type, paths = random.choice(cases)
        path = random.choice(paths)
        valid = data = random_message(random, google_type)
        other = random_message(random, google_type)
        for _ in range(MUTATIONS):
            counts[_compare(google_type, data, path, random.choice(VALUES))] += 1
            data = mutate(random, data if random.random() < 0.3 else valid, other)

    with capsys.disabled():
        print(f"\nshard {shard}: {dict(sorted(counts.items()))}", end=" ")
    assert counts.total() == MESSAGES
    assert min(counts[SET], counts[REFUSED]) > MESSAGES // 10
    assert counts[ADDED] < MESSAGES // 50


def _compare(google_type: type[Message], data: bytes, path: Path, value: str) -> str:
    """Splice one message and set the field with google's parser; fail if the results differ."""
    name = f"{google_type.DESCRIPTOR.full_name} {data.hex()} {path} {value[:130]!r}"
    try:
        expected = google_type.FromString(data)
    except DecodeError:
        try:
            splice(data, path, value)
        except MalformedMessage:
            return REFUSED
        return OFF_PATH
    try:
        spliced = splice(data, path, value)
    except MalformedMessage as error:
        assert str(error) in DISPUTED, name
        return REFUSED
    actual = google_type.FromString(spliced)
    written = _serialize(actual)
    _set(expected, path, value)
    assert spliced is splice(spliced, path, value), name
    if _serialize(expected) == written:
        return SET
    _set(actual, path, value)
    assert _serialize(actual) == written, name
    for message in (expected, actual):
        _drop_new_elements(message, path, value)
    assert _serialize(expected) == _serialize(actual), name
    return ADDED


def _set(message: Any, path: Sequence[int], value: str) -> None:
    """Set the string at the path in every element of its lists, adding one if all are empty."""
    field = message.DESCRIPTOR.fields_by_number[path[0]]
    held = getattr(message, field.name)
    repeated = field.default_value == []
    if not field.message_type:
        setattr(message, field.name, value)
        return
    if repeated and not held:
        held.add()
    for child in held if repeated else [held]:
        _set(child, path[1:], value)


def _drop_new_elements(message: Any, path: Sequence[int], value: str) -> None:
    """Remove list elements on the path that hold the value and nothing else."""
    field = message.DESCRIPTOR.fields_by_number[path[0]]
    if not field.message_type:
        return
    held = getattr(message, field.name)
    if field.default_value != []:
        _drop_new_elements(held, path[1:], value)
        return
    for index in reversed(range(len(held))):
        _drop_new_elements(held[index], path[1:], value)
        new = type(held[index])()
        _set(new, path[1:], value)
        _drop_new_elements(new, path[1:], value)
        if held[index] == new:
            del held[index]


def _serialize(message: Message) -> bytes:
    return message.SerializePartialToString(deterministic=True)


@cache
def _cases() -> list[tuple[type[Message], list[Path]]]:
    """List the contract messages that contain a string at some path, and Everything."""
    google = Google()
    classes = [google.named(name) for name, _ in contract_messages()]
    classes += [google(Everything)] * 10
    cases = [(google_type, _string_paths(google_type)) for google_type in classes]
    return [(google_type, paths) for google_type, paths in cases if paths]


def _string_paths(google_type: type[Message]) -> list[Path]:
    return list(_paths_in(google_type.DESCRIPTOR, deepest=4))


def _paths_in(descriptor: Any, deepest: int) -> Iterator[Path]:
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if oneof is not None and not oneof.name.startswith("_"):
            continue
        if field.type == field.TYPE_STRING:
            if field.default_value == "":
                yield (field.number,)
        elif field.message_type and not field.message_type.GetOptions().map_entry and deepest > 1:
            yield from (
                (field.number, *path) for path in _paths_in(field.message_type, deepest - 1)
            )


def test_paths_of_the_contracts_are_tried() -> None:
    """The cases include the paths named by runtimes, nested paths, and paths through lists."""
    google = Google()

    def tried(message_type: type[betterproto.Message]) -> list[Path]:
        return _string_paths(google(message_type))

    assert (1,) in tried(inference.ModelInferRequest)
    assert (5, 1) in tried(inference.ModelInferRequest)
    assert (1, 1) in tried(inference.ModelConfigResponse)
    assert any(len(path) == 4 for path in tried(inference.ModelConfigResponse))
    assert (1, 1) in tried(inference.ModelStatisticsResponse)


# # --- refusals ----------------------------------------------------------------------------------

MALFORMED: dict[str, bytes] = {
    "cut within a tag": b"\x80",
    "cut behind a tag": tag(TEXT, 2),
    "cut within a size": tag(TEXT, 2) + b"\x80",
    "cut within the field": tag(TEXT, 2) + b"\2a",
    "cut within another field": tag(2, 0),
    "cut within its message": tag(CHILD, 2) + b"\2",
    "the field beyond its message": sized(CHILD, tag(TEXT, 2) + b"\5") + b"abcde",
    "a size behind its message": sized(CHILD, tag(TEXT, 2)) + b"\0",
    "a varint beyond its message": sized(CHILD, tag(2, 0) + b"\x80") + b"\1",
    "size over 31 bits": tag(CHILD, 2) + varint(2**31),
    "size of eleven bytes": tag(CHILD, 2) + b"\x80" * 10 + b"\0",
    "field number 0": sized(CHILD, tag(0, 0) + b"\1"),
    "field number over 29 bits": varint(2**32) + b"\0",
    "wire type 6": sized(CHILD, tag(TEXT, 6)),
    "group without an end": sized(CHILD, tag(99, 3)) + tag(99, 4),
    "end of no group": tag(TEXT, 4),
    "group that ends as another": tag(TEXT, 3) + tag(CHILD, 4),
    "groups that are nested too deeply": tag(99, 3) * 101 + tag(99, 4) * 101,
    "groups that are too deep where they are": sized(CHILD, tag(99, 3) * 100 + tag(99, 4) * 100),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed_messages_are_refused(google: Google, data: bytes) -> None:
    with pytest.raises(DecodeError):
        google(Everything).FromString(data)
    with pytest.raises(MalformedMessage):
        splice(data, (CHILD, TEXT), ID)


def test_depth_is_bounded() -> None:
    path = InjectionPath((CHILD, CHILD, TEXT))

    splice_string(sized(CHILD, b""), path, ID, max_fields=100, max_depth=1)
    with pytest.raises(MalformedMessage, match="nested too deeply"):
        splice_string(sized(CHILD, sized(CHILD, b"")), path, ID, max_fields=100, max_depth=1)


def test_fields_are_counted() -> None:
    """Only fields of the messages on the path are read, and only they count."""
    data = b"\x08\1" * 100

    splice(data + sized(99, data), (TEXT,), ID, max_fields=103)
    with pytest.raises(TooManyFields, match=r"more than 99 fields \(max_message_fields\)"):
        splice(data, (TEXT,), ID, max_fields=99)
    with pytest.raises(TooManyFields):
        splice(sized(CHILD, data), (CHILD, TEXT), ID, max_fields=100)


@pytest.mark.parametrize("around", [sized(TEXT, ""), sized(CHILDREN, b"")], ids=["field", "list"])
def test_a_short_message_does_not_become_a_long_one(around: bytes) -> None:
    """A long value counts wherever it is written: two bytes must not expand to thousands."""
    path = (TEXT,) if around == sized(TEXT, "") else (CHILDREN, TEXT)
    value = "x" * (20 * VALUE_BYTES)

    splice(around * 5, path, value[:9], max_fields=100)
    splice(around, path, value, max_fields=100)
    with pytest.raises(TooManyFields):
        splice(around * 5, path, value, max_fields=100)


def test_occurrences_count_more_than_other_fields() -> None:
    """Rewriting takes longer than reading."""
    others = b"\x08\1" * 99

    splice(others + sized(TEXT, "a"), (TEXT,), ID, max_fields=100 + SPAN_COST)
    with pytest.raises(TooManyFields):
        splice(others + sized(TEXT, "a") * 2, (TEXT,), ID, max_fields=101 + SPAN_COST)


def test_a_long_value_in_one_place_is_no_excess() -> None:
    value = "x" * (50 * VALUE_BYTES)

    assert sized(TEXT, value) == splice(sized(TEXT, "a"), (TEXT,), value, max_fields=100)
    assert sized(TEXT, value) == splice(b"", (TEXT,), value, max_fields=100)


def test_sizes_of_many_levels_are_right() -> None:
    """At the longest permitted path, over all widths of a size prefix."""
    path = (CHILD,) * (MAX_PATH - 1) + (TEXT,)
    for length in (0, 63, 64, 100, 16_300, 3_000_000):
        data = splice(b"", path, "a" * length)
        for _ in path[:-1]:
            (piece,) = pieces(data)
            data = piece.body
        assert sized(TEXT, "a" * length) == data


# --- paths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [(), (0,), (1, -1), (2**29,), (1,) * (MAX_PATH + 1)], ids=str)
def test_path_is_made_of_field_numbers(path: Path) -> None:
    expected = "idInjectionPath: expected 1 to 32 field numbers of 1 to 536870911, got"

    with pytest.raises(InvalidSettings, match=expected):
        InjectionPath(path)


def test_paths_are_equal_by_their_numbers() -> None:
    assert InjectionPath((1, 2)) == InjectionPath((1, 2)) != InjectionPath((2, 1))
    assert 1 == len({InjectionPath((1, 2)), InjectionPath((1, 2))})
