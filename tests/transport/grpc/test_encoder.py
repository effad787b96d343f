"""Encoded bytes equal those of google's protobuf; errors name the field."""

import array
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.protobuf import Colour, Everything, Google, everything

from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve_proto.inference import (
    InferParameter,
    ModelInferResponse,
    ModelStreamInferResponse,
    ServerLiveRequest,
)

LOWEST: dict[str, int] = {
    "int32": -(2**31),
    "sint32": -(2**31),
    "sfixed32": -(2**31),
    "int64": -(2**63),
    "sint64": -(2**63),
    "sfixed64": -(2**63),
    "uint32": 0,
    "uint64": 0,
    "fixed32": 0,
    "fixed64": 0,
}
HIGHEST = {name: low + 2 ** (32 if name.endswith("32") else 64) - 1 for name, low in LOWEST.items()}
INTEGERS = tuple(LOWEST)


def written(google: Google, **values: Any) -> bytes:
    """Return the bytes that google writes for these values."""
    return google(Everything)(**values).SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"int32": -1, "text": "é", "blob": b"\xff", "boolean": True, "colour": Colour.GREEN},
        {"int32": 0, "text": "", "blob": b"", "boolean": False, "float64": 0.0, "colour": 0},
        {"float32": 1.5, "float64": -2.5, "fixed32": 1, "sfixed64": -1},
        {"float32": math.inf, "float64": -math.inf},
        {"chosen_int64": 0},
        {"chosen_text": ""},
        {"chosen_float32": 0.0},
        {"maybe_int32": 0, "maybe_text": "", "maybe_boolean": False, "maybe_float64": 0.0},
        {"texts": ["", "a"], "blobs": [b"", b"a"]},
        {"by_text": {"": b""}},
        {"by_int32": {0: 0.0}},
        {"by_uint64": {2**64 - 1: Colour.ULTRAVIOLET}},
        {"by_sint64": {-(2**63): ""}},
        {"by_sfixed32": {-1: False}},
    ],
    ids=str,
)
def test_values_are_written_as_google_writes_them(
    codec: WireCodec, google: Google, values: dict[str, Any]
) -> None:
    """Defaults are omitted, except for fields with explicit presence and in map entries."""
    assert written(google, **values) == codec.encode_message(everything(**values))


@pytest.mark.parametrize("field", ["float32", "float64"])
def test_negative_zero_is_no_default(codec: WireCodec, google: Google, field: str) -> None:
    assert written(google, **{field: -0.0}) == codec.encode_message(everything(**{field: -0.0}))


@pytest.mark.parametrize("field", INTEGERS)
def test_integers_at_their_limits(codec: WireCodec, google: Google, field: str) -> None:
    for value in (LOWEST[field], HIGHEST[field]):
        many = [value] * 100
        message = everything(**{field: value, f"{field}s": many})

        assert written(google, **{field: value, f"{field}s": many}) == codec.encode_message(message)


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("count", [1, 100])
def test_integers_beyond_their_limits_are_refused(codec: WireCodec, field: str, count: int) -> None:
    for value in (LOWEST[field] - 1, HIGHEST[field] + 1):
        with pytest.raises(ValueError, match=rf"Everything\.{field}: {value} is not between"):
            codec.encode_message(everything(**{field: value}))
        with pytest.raises(ValueError, match=rf"Everything\.{field}s: {value} is not between"):
            codec.encode_message(everything(**{f"{field}s": [0] * (count - 1) + [value]}))


PACKED: dict[str, Sequence[Any]] = {
    "int32s": [0, 1, -1, 127, 128, 300, 2**31 - 1, -(2**31)],
    "int64s": [0, 1, -1, 2**35, 2**63 - 1, -(2**63)],
    "uint32s": [0, 1, 2**32 - 1],
    "uint64s": [0, 1, 2**63, 2**64 - 1],
    "sint32s": [0, -1, 1, 2**31 - 1, -(2**31)],
    "sint64s": [0, -1, 1, 2**63 - 1, -(2**63)],
    "fixed32s": [0, 2**32 - 1],
    "fixed64s": [0, 2**64 - 1],
    "sfixed32s": [0, -1, 2**31 - 1],
    "sfixed64s": [0, -1, 2**63 - 1],
    "float32s": [0.0, -0.0, 1.5, math.inf, 1],
    "float64s": [0.0, -0.0, 0.1, -math.inf, 1],
    "booleans": [True, False, True],
    "colours": [Colour.UNKNOWN, Colour.ULTRAVIOLET, Colour.GREEN, 99],
}


@pytest.mark.parametrize("times", [1, 50])
@pytest.mark.parametrize("field", PACKED)
def test_packed_fields_few_and_many(
    codec: WireCodec, google: Google, field: str, times: int
) -> None:
    """Python writes short lists and numpy long ones; the bytes are the same."""
    values = list(PACKED[field]) * times

    assert written(google, **{field: values}) == codec.encode_message(everything(**{field: values}))


@pytest.mark.parametrize("count", [3, 300])
@pytest.mark.parametrize(
    ("field", "dtype"),
    [
        ("int64s", np.int64),
        ("int64s", np.int8),
        ("uint64s", np.uint64),
        ("int32s", np.uint8),
        ("float32s", np.float32),
        ("float32s", np.float64),
        ("float64s", np.float16),
        ("booleans", np.bool_),
    ],
)
def test_packed_fields_may_be_arrays(
    codec: WireCodec, google: Google, field: str, dtype: type, count: int
) -> None:
    values: Any = (np.arange(count) % 2).astype(dtype)

    assert written(google, **{field: values.tolist()}) == codec.encode_message(
        everything(**{field: values})
    )


def test_packed_fields_may_be_tuples(codec: WireCodec, google: Google) -> None:
    message = everything(int64s=(1, 2, 300))

    assert written(google, int64s=[1, 2, 300]) == codec.encode_message(message)


def test_numbers_of_numpy_are_numbers(codec: WireCodec, google: Google) -> None:
    message = everything(
        int64=np.int8(-1),
        uint64s=[np.uint64(2**64 - 1), np.int32(1)],
        float32=np.float64(0.5),
        boolean=np.bool_(True),
    )

    assert written(
        google, int64=-1, uint64s=[2**64 - 1, 1], float32=0.5, boolean=True
    ) == codec.encode_message(message)


@pytest.mark.parametrize(
    "values",
    [
        {"float32": 1e39},
        {"float32s": [1e39]},
        {"float32s": [0.0] * 99 + [1e39]},
        {"text": "\ud800"},
        {"texts": ["a", "\ud800"]},
        {"by_text": {"\ud800": b""}},
        {"by_int32": {2**31: 0.0}},
        {"text": b"bytes"},
        {"blob": "text"},
        {"int32": "1"},
        {"int32": 1.0},
        {"int32s": ["1"] * 99},
        {"int32s": [[1]] * 99},
        {"int32s": np.ones((9, 9), np.int32)},
        {"int32s": [1.5] * 99},
        {"float64": "1"},
        {"float64s": ["1"] * 99},
        {"boolean": "true"},
        {"colour": 2**31},
        {"child": InferParameter()},
        {"children": [Everything(), None]},
        {"blob": np.ones((4, 4), np.uint8)[:, 1]},
    ],
    ids=str,
)
def test_what_a_field_cannot_hold_is_refused_by_name(
    codec: WireCodec, values: dict[str, Any]
) -> None:
    (name,) = values

    with pytest.raises(ValueError, match=rf"^Everything\.{name}: "):
        codec.encode_message(everything(**values))


def test_a_refusal_names_the_way_to_the_field(codec: WireCodec) -> None:
    message = everything(by_boolean={True: everything(children=[everything(uint32=-1)])})

    with pytest.raises(ValueError, match=r"by_boolean: Everything\.children: Everything\.uint32: "):
        codec.encode_message(message)


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(b"\0\0\x80\x3f"),
        memoryview(b"\0\0\x80\x3f"),
        np.ones(1, np.float32),
        memoryview(bytearray(b"\0\0\x80\x3f")).cast("f", (1, 1)),
        array.array("f", [1.0]),
    ],
    ids=lambda buffer: type(buffer).__name__,
)
def test_bytes_may_be_any_contiguous_buffer(codec: WireCodec, google: Google, buffer: Any) -> None:
    """raw_output_contents may thus be arrays, which are copied only once, into the message."""
    message = everything(blob=buffer, blobs=[buffer, b""])
    raw = bytes(memoryview(buffer).cast("B"))

    assert written(google, blob=raw, blobs=[raw, b""]) == codec.encode_message(message)


def test_buffers_may_be_empty(codec: WireCodec) -> None:
    empty: Any = np.ones((0, 3))

    assert b"\x9a\x02\x00" == codec.encode_message(everything(blobs=[memoryview(empty)]))


def test_large_messages(codec: WireCodec) -> None:
    """Sizes of several bytes, in nested messages."""
    message = everything(child=everything(child=everything(blob=bytes(100_000))))

    assert message == codec.decode_message(Everything, codec.encode_message(message))


# --- presence ----------------------------------------------------------------------------------


def test_member_of_a_oneof_may_be_set_later(codec: WireCodec, google: Google) -> None:
    message = everything(chosen_text="a")
    message.chosen_int64 = 0

    assert written(google, chosen_int64=0) == codec.encode_message(message)


def test_last_member_counts_where_a_oneof_was_given_two(codec: WireCodec, google: Google) -> None:
    """betterproto reports the last one as set."""
    message = everything(chosen_text="a", chosen_int64=5)

    assert written(google, chosen_text="a") == codec.encode_message(message)


def test_message_that_was_only_looked_at_is_not_written(codec: WireCodec) -> None:
    """betterproto creates a message when a field is read."""
    message = Everything()

    assert 0 == message.child.int32
    assert [] == message.child.int32s
    assert b"" == codec.encode_message(message)


def test_message_that_was_filled_in_place_is_written(codec: WireCodec, google: Google) -> None:
    message = Everything()
    message.child.int32s.append(1)

    expected = google(Everything)()
    expected.child.int32s.append(1)  # type: ignore[attr-defined]
    assert expected.SerializeToString() == codec.encode_message(message)


def test_message_that_came_empty_is_written_empty(codec: WireCodec) -> None:
    for data in (b"\x8a\x01\x00", b"\xaa\x02\x00", b"\xfa\x03\x00"):
        assert data == codec.encode_message(codec.decode_message(Everything, data))


def test_message_without_fields_is_nothing(codec: WireCodec) -> None:
    assert b"" == codec.encode_message(ServerLiveRequest())


def test_nested_response_is_written(codec: WireCodec, google: Google) -> None:
    message = ModelStreamInferResponse(infer_response=ModelInferResponse(model_name="m"))

    answer = google(ModelStreamInferResponse).FromString(codec.encode_message(message))

    assert "m" == answer.infer_response.model_name  # type: ignore[attr-defined]
