"""Decoding work is bounded: a message that would block the event loop is refused early."""

import pytest
from google.protobuf.message import DecodeError
from support.mutation import varint
from support.protobuf import Everything, Google, everything

from xlaserve.errors.message import MalformedMessage, TooManyFields
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.grpc.protobuf.decoder import PACKED_BYTES
from xlaserve.grpc.protobuf.reader import MESSAGE_COST
from xlaserve_proto.inference import ModelInferRequest

ONE_MIB = 1 << 20


def sized(number: int, body: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(body)) + body


def counted(data: bytes, message_type: type = Everything) -> int:
    """Return the lowest field limit that a message passes."""
    low, high = 0, ONE_MIB
    while low < high:
        middle = (low + high) // 2
        try:
            WireCodec(max_fields=middle).decode_message(message_type, data)
            high = middle
        except TooManyFields:
            low = middle + 1
    return low


def test_limit_is_the_number_of_fields() -> None:
    assert 1000 == counted(b"\x08\x01" * 1000)


def test_unknown_fields_count() -> None:
    assert 1000 == counted(b"\x78\x01" * 1000)


def test_fields_count_at_every_depth() -> None:
    one, more = (counted(sized(17, sized(17, b"\x08\x01" * count))) for count in (1, 51))

    assert 50 == more - one


def test_long_varints_count_by_their_bytes() -> None:
    """In tags, sizes, values and groups: long varints take proportionally longer to read."""
    assert 10 == counted(b"\x08" + b"\xff" * 9 + b"\x01")
    assert 3 == counted(b"\x88\x80\x00\x01")
    assert 4 == counted(b"\x72\x81\x80\x80\x00a")
    assert 12 == counted(b"\x7b\x08" + b"\xff" * 9 + b"\x01\x7c")


def test_nested_messages_count_more() -> None:
    empty = b"\x2a\x00"

    assert counted(empty, ModelInferRequest) > MESSAGE_COST
    assert 10 * counted(empty, ModelInferRequest) == counted(empty * 10, ModelInferRequest)


def test_map_entries_count_more() -> None:
    entry = sized(4, sized(1, b"k"))

    assert counted(entry, ModelInferRequest) > 2 * MESSAGE_COST


def test_numbers_of_a_packed_field_hardly_count() -> None:
    """A typed tensor of a hundred thousand elements is within the default limit."""
    message = everything(float32s=[1.5] * 100_000, int64s=[2**40] * 100_000)

    assert message == WireCodec().decode_message(Everything, WireCodec().encode_message(message))


def test_packed_fields_count_by_their_bytes() -> None:
    small, large = (counted(sized(33, b"\1" * size)) for size in (10_000, 1_000_000))

    assert (1_000_000 - 10_000) // PACKED_BYTES == pytest.approx(large - small, abs=5)


def test_packed_enums_count_one_by_one() -> None:
    """Every unknown enum number becomes a separate object."""
    assert counted(sized(36, b"\7" * 10_000)) > 10_000


def test_limit_is_named() -> None:
    with pytest.raises(TooManyFields, match=r"more than 100 fields \(max_message_fields\)"):
        WireCodec(max_fields=100).decode_message(Everything, b"\x08\x01" * 101)


BOMBS = {
    "unknown varints": b"\x78\x01",
    "unknown long varints": b"\xf8\xff\xff\xff\x0f" + b"\xff" * 9 + b"\x01",
    "unknown bytes": b"\x7a\x00",
    "long sizes": b"\x7a" + b"\x80" * 4 + b"\x00",
    "groups": b"\x7b" * 100 + b"\x7c" * 100,
    "empty inputs": b"\x2a\x00",
    "inputs with empty contents": b"\x2a\x02\x2a\x00",
    "empty map entries": b"\x22\x00",
    "raw contents": b"\x3a\x00",
    "long strings": sized(1, b"abc"),
    "empty packed fields": sized(5, b"\x1a\x00"),
    "short packed fields": sized(5, sized(3, b"\xff\x01")),
    "single integers": sized(5, b"\x18\x01"),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_messages_of_many_small_things_are_refused(codec: WireCodec, bomb: bytes) -> None:
    """A mebibyte of each would block the loop; tools/bench_codec.py measures for how long."""
    with pytest.raises(TooManyFields):
        codec.decode_message(ModelInferRequest, bomb * (ONE_MIB // len(bomb)))


@pytest.mark.parametrize("step", [b"\1", b"\xff\1", b"\xff" * 9 + b"\1"], ids=len)
def test_a_mebibyte_of_packed_varints_is_read(codec: WireCodec, step: bytes) -> None:
    count = ONE_MIB // len(step)

    decoded = codec.decode_message(Everything, sized(22, step * count))

    value = {1: 1, 2: 255, 10: -1}[len(step)]
    assert [value] * count == decoded.int64s


# --- depth -------------------------------------------------------------------------------------


def nest(number: int, depth: int, data: bytes = b"") -> bytes:
    for _ in range(depth):
        data = sized(number, data)
    return data


def groups(depth: int) -> bytes:
    return varint(99 << 3 | 3) * depth + varint(99 << 3 | 4) * depth


def entries(depth: int) -> bytes:
    """Nest maps of messages: each level is an entry and a message."""
    data = b""
    for _ in range(depth // 2):
        data = sized(54, sized(2, data))
    return data


DEEPEST = {
    "messages": nest(17, 100),
    "messages of a list": nest(37, 100),
    "messages of a oneof": nest(63, 100),
    "map entries": entries(100),
    "groups": groups(100),
    "groups in messages": nest(17, 50, groups(50)),
}


@pytest.mark.parametrize("data", DEEPEST.values(), ids=DEEPEST)
def test_a_hundred_levels_are_read_and_one_more_is_not(
    codec: WireCodec, google: Google, data: bytes
) -> None:
    """The limit of protobuf's own parsers (Encoding, nested messages and groups)."""
    google(Everything).FromString(data)
    codec.decode_message(Everything, data)

    with pytest.raises(DecodeError):
        google(Everything).FromString(sized(17, data))
    with pytest.raises(MalformedMessage):
        codec.decode_message(Everything, sized(17, data))


def test_depth_is_a_limit() -> None:
    codec = WireCodec(max_depth=10)
    codec.decode_message(Everything, nest(17, 10))

    for data in (nest(17, 11), groups(11), entries(12)):
        with pytest.raises(MalformedMessage):
            codec.decode_message(Everything, data)


def test_depth_is_not_length(codec: WireCodec) -> None:
    """Adjacent messages do not nest."""
    data = (nest(37, 50) + groups(50) + sized(54, sized(2, b""))) * 3

    assert 3 == len(codec.decode_message(Everything, data).children)
