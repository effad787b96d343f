"""Every rule of the wire format, one by one; google's protobuf agrees on each."""

from typing import Any

import betterproto
import pytest
from google.protobuf.message import DecodeError
from support.mutation import varint
from support.protobuf import Colour, Everything, Google, everything

from xlaserve.errors.message import MalformedMessage
from xlaserve.grpc.protobuf.codec import WireCodec


def tag(number: int, wire: int) -> bytes:
    return varint(number << 3 | wire)


def sized(number: int, body: bytes) -> bytes:
    return tag(number, 2) + varint(len(body)) + body


def number(of: int, value: int, padding: int = 0) -> bytes:
    return tag(of, 0) + varint(value, padding)


NINE = b"\xff" * 9
"""Bytes of an unfinished varint."""

MALFORMED = {
    "cut within a tag": b"\x80",
    "cut behind a tag": tag(2, 0),
    "cut within a varint": tag(2, 0) + b"\x80",
    "cut within a size": tag(14, 2) + b"\x80",
    "cut within a string": tag(14, 2) + b"\x02a",
    "cut within four bytes": tag(7, 5) + bytes(3),
    "cut within eight bytes": tag(8, 1) + bytes(7),
    "cut within an unknown field": tag(99, 2) + b"\x01",
    "wire type 6": tag(2, 6) + b"\0",
    "wire type 7": tag(99, 7) + b"\0",
    "field number 0": number(0, 5),
    "field number 0, length-delimited": sized(0, b""),
    "field number 0, a group": tag(0, 3) + tag(0, 4),
    "field number 0, written long": b"\x80\x00\x05",
    "field number over 29 bits": varint(2**32) + b"\0",
    "tag of six bytes": varint(2 << 3, 5) + b"\5",
    "varint of eleven bytes": tag(2, 0) + b"\x80" * 10 + b"\1",
    "unknown varint of eleven bytes": tag(99, 0) + b"\x80" * 10 + b"\1",
    "size of eleven bytes": tag(14, 2) + b"\x80" * 10 + b"\0",
    "size of five bytes and over 31 bits": tag(14, 2) + b"\x81\x80\x80\x80\x08a",
    "size over 31 bits": tag(14, 2) + varint(2**31) + b"a",
    "size that is negative": tag(14, 2) + NINE + b"\1" + b"a",
    "nested message beyond its parent": sized(17, tag(14, 2) + b"\x05") + b"abcde",
    "nested varint beyond its parent": sized(17, tag(2, 0) + b"\x80") + b"\1",
    "nested tag beyond its parent": sized(17, b"\x80") + b"\1",
    "nested size behind its parent": sized(17, tag(14, 2)) + b"\0",
    "text that is not UTF-8": sized(14, b"\xff"),
    "text that is cut within a character": sized(14, "é".encode()[:1]),
    "text with a surrogate": sized(14, b"\xed\xa0\x80"),
    "text with an overlong character": sized(14, b"\xc0\x80"),
    "text beyond Unicode": sized(14, b"\xf4\x90\x80\x80"),
    "one text of many that is not UTF-8": sized(34, b"a") + sized(34, b"\xff"),
    "map key that is not UTF-8": sized(51, sized(1, b"\xff")),
    "map entry that is cut": sized(51, tag(1, 2) + b"\2a"),
    "packed varint that is cut": sized(22, b"\x80") + b"\1",
    "packed varint that is cut, after many": sized(22, b"\1" * 100 + b"\x80"),
    "packed varint of eleven bytes": sized(22, b"\x80" * 10 + b"\1"),
    "packed varint of eleven bytes, after many": sized(22, b"\1" * 100 + b"\x80" * 10 + b"\1"),
    "packed fixed32 that is cut": sized(27, bytes(7)),
    "packed double that is cut": sized(32, bytes(999)),
    "end of no group": tag(99, 4),
    "group without an end": tag(99, 3),
    "group that ends as another": tag(99, 3) + tag(98, 4),
    "group that ends beyond its message": sized(17, tag(99, 3)) + tag(99, 4),
    "group that ends within another message": tag(99, 3) + sized(17, tag(99, 4)),
    "group of a known number without an end": tag(2, 3) + number(1, 5),
    "wire type 6 in a group": tag(99, 3) + tag(2, 6) + tag(99, 4),
    "long varint in a group": tag(99, 3) + tag(1, 0) + b"\x80" * 10 + b"\1" + tag(99, 4),
    "cut within a group": tag(99, 3) + tag(1, 2) + b"\5",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed_messages_are_refused(codec: WireCodec, google: Google, data: bytes) -> None:
    with pytest.raises(DecodeError):
        google(Everything).FromString(data)
    with pytest.raises(MalformedMessage):
        codec.decode_message(Everything, data)


DISPUTED = {
    "size of six bytes": tag(14, 2) + varint(1, 5) + b"a",
    "field number 0 in a group": tag(99, 3) + number(0, 5) + tag(99, 4),
}


@pytest.mark.parametrize("data", DISPUTED.values(), ids=DISPUTED)
def test_what_only_some_versions_of_google_refuse_is_refused(codec: WireCodec, data: bytes) -> None:
    """protobuf 6 accepts the size and 7 the field number; a strict reader accepts neither."""
    with pytest.raises(MalformedMessage):
        codec.decode_message(Everything, data)


UNKNOWN = {
    "varint": number(99, 2**64 - 1),
    "fixed32": tag(99, 5) + bytes(4),
    "fixed64": tag(99, 1) + bytes(8),
    "bytes": sized(99, b"\xff\xff"),
    "bytes like a malformed message": sized(99, number(0, 1)),
    "largest field number": sized(2**29 - 1, b"x"),
    "empty group": tag(99, 3) + tag(99, 4),
    "group with everything": tag(99, 3)
    + number(1, 2**64 - 1)
    + tag(1, 5)
    + bytes(4)
    + tag(1, 1)
    + bytes(8)
    + sized(14, b"\xff")
    + tag(1, 3)
    + tag(1, 4)
    + tag(99, 4),
    "group whose end is written long": tag(9, 3) + varint(9 << 3 | 4, 3),
    "group of a known number": tag(2, 3) + number(2, 5) + tag(2, 4),
    "integer as bytes": sized(2, b"\5"),
    "integer as fixed32": tag(2, 5) + bytes(4),
    "text as varint": number(14, 5),
    "message as varint": number(17, 5),
    "map as varint": number(51, 5),
    "double as fixed32": tag(12, 5) + bytes(4),
    "packed doubles as varint": number(32, 5),
    "member of a oneof as another type": sized(61, b"\5"),
}


@pytest.mark.parametrize("data", UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_fields_are_skipped(codec: WireCodec, google: Google, data: bytes) -> None:
    """A known field number with another wire type also counts as an unknown field."""
    surrounded = number(1, 1) + data + number(3, 3)
    google(Everything).FromString(surrounded)

    message = codec.decode_message(Everything, surrounded)

    assert everything(int32=1, uint32=3) == message
    assert betterproto.which_one_of(message, "choice") == ("", None)


READ = {
    "int64 with a varint written long": (number(2, 5, padding=8), {"int64": 5}),
    "tag written long": (varint(2 << 3, 3) + b"\5", {"int64": 5}),
    "size written long": (tag(14, 2) + varint(1, 4) + b"a", {"text": "a"}),
    "int64 that is negative": (number(2, 2**64 - 1), {"int64": -1}),
    "int64 with bits over 64": (tag(2, 0) + NINE + b"\x7f", {"int64": -1}),
    "int64 with no bits but over 64": (tag(2, 0) + b"\x80" * 9 + b"\x02", {"int64": 0}),
    "uint64, the largest": (number(4, 2**64 - 1), {"uint64": 2**64 - 1}),
    "int32 cut to 32 bits": (number(1, 2**32 + 5), {"int32": 5}),
    "int32 cut to a negative": (number(1, 2**31), {"int32": -(2**31)}),
    "uint32 cut to 32 bits": (number(3, 2**35 - 1), {"uint32": 2**32 - 1}),
    "sint32 cut to 32 bits": (number(5, 2**32 + 1), {"sint32": -1}),
    "sint32, the least": (number(5, 2**32 - 1), {"sint32": -(2**31)}),
    "sint64, the least": (number(6, 2**64 - 1), {"sint64": -(2**63)}),
    "sint64, the largest": (number(6, 2**64 - 2), {"sint64": 2**63 - 1}),
    "bool from any varint": (number(13, 2**40), {"boolean": True}),
    "bool from a zero written long": (number(13, 0, padding=5), {"boolean": False}),
    "bool from bits over 64": (tag(13, 0) + b"\x80" * 9 + b"\x02", {"boolean": False}),
    "enum cut to 32 bits": (number(16, 2**32 + 7), {"colour": Colour.GREEN}),
    "enum that is negative": (number(16, 2**64 - 3), {"colour": Colour.ULTRAVIOLET}),
    "fixed32": (tag(7, 5) + b"\xff" * 4, {"fixed32": 2**32 - 1}),
    "fixed64": (tag(8, 1) + b"\xff" * 8, {"fixed64": 2**64 - 1}),
    "sfixed32": (tag(9, 5) + b"\xff" * 4, {"sfixed32": -1}),
    "sfixed64": (tag(10, 1) + b"\xfe" + b"\xff" * 7, {"sfixed64": -2}),
    "float": (tag(11, 5) + b"\0\0\xc0\x3f", {"float32": 1.5}),
    "double": (tag(12, 1) + b"\0\0\0\0\0\0\xf8\x3f", {"float64": 1.5}),
    "bytes that are not UTF-8": (sized(15, b"\xff\0"), {"blob": b"\xff\0"}),
    "the last of a field given twice": (number(2, 5) + number(2, 6), {"int64": 6}),
    "integers, packed": (sized(22, b"\1\xac\2\0"), {"int64s": [1, 300, 0]}),
    "integers, single": (number(22, 1) + number(22, 300), {"int64s": [1, 300]}),
    "integers, packed and single": (
        sized(22, b"\1") + number(22, 300) + sized(22, b"") + sized(22, b"\2"),
        {"int64s": [1, 300, 2]},
    ),
    "fixed32s, packed and single": (
        sized(27, bytes(4) + b"\1\0\0\0") + tag(27, 5) + b"\2\0\0\0",
        {"fixed32s": [0, 1, 2]},
    ),
    "many packed integers": (sized(21, b"\xac\2" * 99 + b"\5"), {"int32s": [300] * 99 + [5]}),
    "many packed integers, cut": (
        sized(21, varint(2**32 + 1) * 99 + NINE + b"\x7f"),
        {"int32s": [1] * 99 + [-1]},
    ),
    "many packed bools": (
        sized(33, varint(2**40) * 99 + b"\0"),
        {"booleans": [True] * 99 + [False]},
    ),
    "many packed zigzags": (
        sized(26, varint(2**64 - 1) * 99 + b"\1\2"),
        {"sint64s": [-(2**63)] * 99 + [-1, 1]},
    ),
    "many packed enums": (sized(36, b"\7" * 99), {"colours": [Colour.GREEN] * 99}),
    "more packed integers than one slab": (
        sized(24, varint(2**63) * 20_000),
        {"uint64s": [2**63] * 20_000},
    ),
    "texts, an empty one too": (sized(34, b"") + sized(34, b"a"), {"texts": ["", "a"]}),
    "an empty message": (sized(17, b""), {"child": Everything()}),
    "empty messages in a list": (sized(37, b"") * 2, {"children": [Everything(), Everything()]}),
    "a message given twice": (
        sized(17, number(1, 1) + sized(22, b"\1")) + sized(17, number(2, 2) + sized(22, b"\2")),
        {"child": everything(int32=1, int64=2, int64s=[1, 2])},
    ),
    "the last member of a oneof": (number(61, 1) + sized(62, b"a"), {"chosen_text": "a"}),
    "a member of a oneof that is a default": (number(61, 0), {"chosen_int64": 0}),
    "a oneof's message given twice": (
        sized(63, number(1, 1)) + sized(63, number(2, 2)),
        {"chosen_child": everything(int32=1, int64=2)},
    ),
    "a oneof's message, after another": (
        sized(63, number(1, 1)) + sized(64, number(3, 3)) + sized(63, number(2, 2)),
        {"chosen_child": everything(int64=2)},
    ),
    "an optional default": (number(41, 0), {"maybe_int32": 0}),
    "a map": (sized(51, sized(1, b"k") + sized(2, b"v")), {"by_text": {"k": b"v"}}),
    "a map entry in the other order": (
        sized(51, sized(2, b"v") + sized(1, b"k")),
        {"by_text": {"k": b"v"}},
    ),
    "a map entry without anything": (sized(51, b""), {"by_text": {"": b""}}),
    "a map entry without a key": (sized(52, tag(2, 1) + bytes(8)), {"by_int32": {0: 0.0}}),
    "a map entry without a value": (sized(53, number(1, 5)), {"by_uint64": {5: Colour.UNKNOWN}}),
    "a map entry without a message": (
        sized(54, number(1, 1)),
        {"by_boolean": {True: Everything()}},
    ),
    "a map key given twice in an entry": (
        sized(51, sized(1, b"a") + sized(1, b"b")),
        {"by_text": {"b": b""}},
    ),
    "a message given twice in an entry": (
        sized(54, sized(2, number(1, 1)) + sized(2, number(2, 2))),
        {"by_boolean": {False: everything(int32=1, int64=2)}},
    ),
    "the last entry of a key": (
        sized(54, sized(2, number(1, 1))) + sized(54, sized(2, number(2, 2))),
        {"by_boolean": {False: everything(int64=2)}},
    ),
}


@pytest.mark.parametrize(("data", "values"), READ.values(), ids=READ)
def test_well_formed_messages_are_read(
    codec: WireCodec, google: Google, data: bytes, values: dict[str, Any]
) -> None:
    expected = google(Everything)
    actual = codec.decode_message(Everything, data)

    assert everything(**values) == actual
    assert {name: getattr(actual, name) for name in values} == values
    assert expected.FromString(data) == expected.FromString(codec.encode_message(actual))


def test_unknown_fields_of_a_nested_message_are_skipped(codec: WireCodec) -> None:
    data = sized(17, number(99, 1) + number(1, 1) + tag(99, 3) + tag(99, 4))

    assert everything(child=everything(int32=1)) == codec.decode_message(Everything, data)


def test_unknown_fields_of_a_map_entry_are_skipped(codec: WireCodec) -> None:
    """The specification says so for every message; upb drops the entry instead."""
    entry = number(99, 1) + sized(1, b"k") + number(1, 5) + sized(2, b"v") + sized(3, b"x")

    assert everything(by_text={"k": b"v"}) == codec.decode_message(Everything, sized(51, entry))


def test_unknown_members_of_an_enum_are_kept(codec: WireCodec) -> None:
    """Enums are open: a number without a name is a value (Language Guide, Enum)."""
    message = codec.decode_message(Everything, number(16, 2) + sized(36, varint(2**64 - 9) + b"\7"))

    assert (2, Colour, None) == (message.colour, type(message.colour), message.colour.name)
    assert [-9, Colour.GREEN] == message.colours
    assert codec.decode_message(Everything, codec.encode_message(message)) == message


def test_empty_input_is_the_empty_message(codec: WireCodec) -> None:
    assert Everything() == codec.decode_message(Everything, b"")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_input_may_be_any_buffer(codec: WireCodec, kind: Any) -> None:
    """Strings, bytes and packed fields have the same values and types."""
    data = sized(14, "é".encode()) + sized(15, b"b") + sized(22, b"\1" * 9) + sized(31, bytes(400))

    message = codec.decode_message(Everything, kind(data))

    assert everything(text="é", blob=b"b", int64s=[1] * 9, float32s=[0.0] * 100) == message
    assert (str, bytes) == (type(message.text), type(message.blob))
