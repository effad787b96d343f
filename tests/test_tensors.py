import struct
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from xlaserve import tensors
from xlaserve.errors import UnknownDatatype
from xlaserve.tensors import (
    BY_CONFIG_NAME,
    BYTES,
    DATATYPES,
    MAX_DIMENSIONS,
    Datatype,
    Tensor,
    TensorDataError,
    TensorSpec,
    byte_elements,
    datatype_named,
    datatype_of,
    describe,
    element_count,
    from_bytes,
    from_elements,
    pack_bytes,
    to_bytes,
    unpack_bytes,
)
from xlaserve.tensors.byte_elements import PIECE_BYTES, PIECE_ELEMENTS
from xlaserve_proto.inference import DataType

FIXED = [datatype for datatype in DATATYPES.values() if datatype is not BYTES]
INTEGERS = [datatype for datatype in FIXED if datatype.dtype.kind in "iu"]
FLOATS = [DATATYPES[name] for name in ("FP16", "BF16", "FP32", "FP64")]

SHAPES = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


def _refused(datatype: Datatype, shape: list[int], data: bytes) -> str:
    with pytest.raises(TensorDataError) as caught:
        from_bytes(datatype, shape, data)
    return str(caught.value)


@st.composite
def _raw_tensors(draw: st.DrawFn) -> tuple[Datatype, tuple[int, ...], bytes]:
    datatype, shape = draw(st.sampled_from(FIXED)), draw(SHAPES)
    size = element_count(shape) * datatype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if datatype.name == "BOOL":
        data = bytes(byte & 1 for byte in data)
    return datatype, shape, data


@st.composite
def _text_tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(SHAPES)
    count = element_count(shape)
    elements = draw(st.lists(st.binary(max_size=9), min_size=count, max_size=count))
    return from_elements(BYTES, shape, elements)


# --- the table --------------------------------------------------------------------------------


def test_table_has_the_datatypes_of_the_protocol() -> None:
    """The datatypes of V2 protocol, Tensor Data Types, and BF16."""
    names = "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BYTES BF16"

    assert set(names.split()) == set(DATATYPES)


@pytest.mark.parametrize("datatype", DATATYPES.values(), ids=str)
def test_every_row_is_found_by_each_of_its_names(datatype: Datatype) -> None:
    assert datatype is datatype_named(datatype.name)
    assert datatype is BY_CONFIG_NAME[datatype.config_name]
    assert datatype is datatype_of(datatype.dtype)


@pytest.mark.parametrize("datatype", FIXED, ids=str)
def test_itemsize_is_that_of_the_dtype(datatype: Datatype) -> None:
    assert datatype.dtype.itemsize == datatype.itemsize


@pytest.mark.parametrize("datatype", DATATYPES.values(), ids=str)
def test_number_is_that_of_the_configuration(datatype: Datatype) -> None:
    assert DataType[datatype.config_name].value == datatype.config_number


def test_unknown_datatype_lists_the_known() -> None:
    with pytest.raises(UnknownDatatype, match="unknown datatype 'FLOAT', expected one of BOOL"):
        datatype_named("FLOAT")


@pytest.mark.parametrize("dtype", [np.complex64, "U3", "datetime64[s]", ml_dtypes.float8_e4m3fn])
def test_dtype_that_the_protocol_cannot_name_has_no_row(dtype: object) -> None:
    assert datatype_of(dtype) is None


# --- specifications ---------------------------------------------------------------------------


def test_specification_is_shown_as_datatype_and_shape() -> None:
    assert "FP32[-1,784]" == str(TensorSpec("x", DATATYPES["FP32"], (-1, 784)))


def test_shape_is_shown_in_part_where_it_is_long() -> None:
    assert "FP32[" + "1," * 16 + "...]" == describe("FP32", (1,) * 1000)


@pytest.mark.parametrize(
    ("shape", "fits"), [((3, 4), True), ((0, 4), True), ((3, 5), False), ((4,), False), ((), False)]
)
def test_shape_fits_where_each_size_is_the_wanted_or_any_is(
    shape: tuple[int, ...], fits: bool
) -> None:
    assert fits is TensorSpec("x", DATATYPES["FP32"], (-1, 4)).accepts(shape)


def test_scalar_has_one_element() -> None:
    assert 1 == element_count(())


def test_count_of_elements_does_not_overflow() -> None:
    assert 2**186 == element_count((2**62, 2**62, 2**62))


def test_negative_size_is_refused() -> None:
    with pytest.raises(TensorDataError, match=r"without negative dimensions, got \[2, -1\]"):
        element_count((2, -1))


def test_more_dimensions_than_an_array_can_have_are_refused() -> None:
    assert 1 == element_count([1] * MAX_DIMENSIONS)
    assert MAX_DIMENSIONS == np.zeros([1] * MAX_DIMENSIONS).ndim
    with pytest.raises(TensorDataError, match=f"at most {MAX_DIMENSIONS} dimensions, got 65"):
        element_count([1] * (MAX_DIMENSIONS + 1))
    with pytest.raises(TensorDataError, match=f"at most {MAX_DIMENSIONS} dimensions, got 100000"):
        element_count((2**62,) * 100_000)


# --- raw bytes --------------------------------------------------------------------------------


@given(_raw_tensors())
def test_raw_bytes_round_trip(raw: tuple[Datatype, tuple[int, ...], bytes]) -> None:
    datatype, shape, data = raw

    tensor = from_bytes(datatype, shape, data)

    assert tensor.shape == shape
    assert datatype.dtype == tensor.dtype
    assert data == bytes(to_bytes(datatype, tensor))


@pytest.mark.parametrize("datatype", FIXED, ids=str)
@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview])
def test_array_views_the_bytes_and_the_bytes_view_the_array(
    datatype: Datatype, buffer: type
) -> None:
    data = buffer(bytes(8 * datatype.itemsize))

    tensor = from_bytes(datatype, (2, 4), data)
    again = to_bytes(datatype, tensor)

    assert np.shares_memory(tensor, np.frombuffer(data, np.uint8))
    assert np.shares_memory(tensor, np.frombuffer(again, np.uint8))


def test_bytes_are_little_endian_in_row_major_order() -> None:
    tensor = from_bytes(DATATYPES["INT16"], (2, 2), b"\1\0\2\0\3\0\0\1")

    assert [[1, 2], [3, 256]] == tensor.tolist()


def test_half_floats_are_what_their_bits_say() -> None:
    assert [1.5] == from_bytes(DATATYPES["FP16"], (1,), b"\x00\x3e").tolist()
    assert [1.5] == from_bytes(DATATYPES["BF16"], (1,), b"\xc0\x3f").tolist()


def test_transposed_array_becomes_row_major_bytes() -> None:
    tensor = np.array([[1, 2], [3, 4]], dtype="u1").T

    assert b"\1\3\2\4" == bytes(to_bytes(DATATYPES["UINT8"], tensor))


@pytest.mark.parametrize("datatype", FIXED, ids=str)
def test_wrong_number_of_bytes_is_refused(datatype: Datatype) -> None:
    size = 6 * datatype.itemsize
    expected = f"expected {size} bytes for {datatype}[2,3], got {size + 1} bytes"

    assert expected == _refused(datatype, [2, 3], bytes(size + 1))
    assert f"got {size - 1} bytes" in _refused(datatype, [2, 3], bytes(size - 1))


def test_size_is_counted_in_bytes_whatever_the_buffer_counts() -> None:
    data = np.arange(4, dtype="<f4").data

    assert [0, 1, 2, 3] == from_bytes(DATATYPES["FP32"], (4,), data).tolist()


@pytest.mark.parametrize("data", [b"\2\0", b"\0\xff"])
def test_boolean_byte_other_than_0_and_1_is_refused(data: bytes) -> None:
    assert "expected BOOL bytes of 0 or 1, got another byte" == _refused(
        DATATYPES["BOOL"], [2], data
    )


@pytest.mark.parametrize("datatype", DATATYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2)])
def test_tensor_may_be_empty(datatype: Datatype, shape: tuple[int, ...]) -> None:
    tensor = from_bytes(datatype, shape, b"")

    assert tensor.shape == shape
    assert b"" == bytes(to_bytes(datatype, tensor))


@pytest.mark.parametrize("datatype", DATATYPES.values(), ids=str)
@pytest.mark.parametrize(
    "shape", [[2**62, 8], [2**63 - 1, 2**63 - 1, 3], [2**31, 2**31], [-1, 2], [1] * 65]
)
def test_shape_that_overflows_is_refused(datatype: Datatype, shape: list[int]) -> None:
    assert "expected" in _refused(datatype, shape, b"12345678")


@pytest.mark.parametrize("datatype", DATATYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [[0, 2**62, 8], [2**63 - 1, 3, 0], [0, 2**64], [0, -1], [0] * 65])
def test_empty_shape_that_overflows_is_refused(datatype: Datatype, shape: list[int]) -> None:
    """The number of elements is zero, yet no array can have this shape."""
    assert "expected" in _refused(datatype, shape, b"")


# --- BYTES ------------------------------------------------------------------------------------


@given(_text_tensors())
def test_texts_round_trip(tensor: Tensor) -> None:
    again = unpack_bytes(tensor.shape, pack_bytes(tensor))

    assert tensor.shape == again.shape
    assert tensor.tolist() == again.tolist()


def test_text_is_a_length_and_its_bytes() -> None:
    tensor = unpack_bytes((2,), b"\1\0\0\0x\0\0\0\0")

    assert [b"x", b""] == tensor.tolist()
    assert b"\1\0\0\0x\0\0\0\0" == pack_bytes(tensor)


def test_many_empty_texts_are_unpacked() -> None:
    count = 2**18

    assert count == unpack_bytes((count,), bytes(4 * count)).size


@pytest.mark.parametrize(
    "sizes",
    [
        [PIECE_BYTES - 4, 1],
        [PIECE_BYTES - 5, 0, 1],
        [PIECE_BYTES - 8, 0, 2],
        [PIECE_BYTES - 6, 7],
        [3, 2 * PIECE_BYTES, 5],
        [1] * (PIECE_ELEMENTS + 1),
        [7] * (2 * PIECE_ELEMENTS),
    ],
)
def test_texts_of_several_pieces_are_unpacked_and_packed(sizes: list[int]) -> None:
    """Elements and their lengths cross the boundaries of pieces."""
    texts = [bytes([65 + index % 26]) * size for index, size in enumerate(sizes)]
    data = b"".join(struct.pack("<I", len(text)) + text for text in texts)

    assert texts == unpack_bytes((len(texts),), memoryview(data)).tolist()
    assert data == pack_bytes(np.array(texts, dtype=object))


@pytest.mark.parametrize(
    ("sizes", "cut_off", "count", "problem"),
    [
        ([PIECE_BYTES, 9], 1, 2, "expected 9 bytes of element 1, got 8 bytes"),
        ([PIECE_BYTES, 9], 10, 2, "expected 2 elements, got 1 elements in"),
        ([PIECE_BYTES + 1], 2, 1, f"expected {PIECE_BYTES + 1} bytes of element 0, got"),
        ([PIECE_BYTES, 9], 0, 1, "expected 1 elements, got 13 extra bytes"),
    ],
)
def test_lengths_of_several_pieces_must_add_up(
    sizes: list[int], cut_off: int, count: int, problem: str
) -> None:
    data = b"".join(struct.pack("<I", size) + bytes(size) for size in sizes)

    assert problem in _refused(BYTES, [count], data[: len(data) - cut_off])


def test_no_call_handles_more_than_a_piece_of_many_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call holds the GIL throughout, which blocks the event loop."""
    count = 3 * PIECE_ELEMENTS
    data = memoryview(bytes(4 * count))
    cut_at_once: list[int] = []
    packed_at_once: list[int] = []

    def noted_cut(raw: bytes, most: int) -> tuple[list[bytes], int]:
        cut_at_once.append(len(raw))
        return byte_elements.cut(raw, most)

    def noted_packed(elements: Sequence[bytes]) -> bytes:
        packed_at_once.append(len(elements))
        return byte_elements.packed(elements)

    monkeypatch.setattr(tensors, "cut", noted_cut)
    monkeypatch.setattr(tensors, "packed", noted_packed)
    tensor = unpack_bytes((count,), data)

    assert data == pack_bytes(tensor)
    assert count == sum(packed_at_once)
    assert PIECE_ELEMENTS >= max(packed_at_once)
    assert len(cut_at_once) >= 3
    assert PIECE_BYTES >= max(cut_at_once)


@pytest.mark.parametrize(
    ("shape", "data", "problem"),
    [
        ([1], b"", "expected 1 length-prefixed elements for BYTES[1], got 0 bytes"),
        ([2], b"\0\0\0\0\0\0\0", "expected 2 length-prefixed elements for BYTES[2], got 7 bytes"),
        ([1], b"\2\0\0\0x", "expected 2 bytes of element 0, got 1 bytes"),
        ([1], b"\xff\xff\xff\xff", "expected 4294967295 bytes of element 0, got 0 bytes"),
        ([2], b"\1\0\0\0x\0\0\0", "expected 2 elements, got 1 elements in 8 bytes"),
        ([1], b"\0\0\0\0\0", "expected 1 elements, got 1 extra bytes"),
        ([0], b"\0\0\0\0", "expected 0 elements, got 4 extra bytes"),
        ([2**40], b"", "expected 1099511627776 length-prefixed elements"),
    ],
)
def test_lengths_must_add_up(shape: list[int], data: bytes, problem: str) -> None:
    assert problem in _refused(BYTES, shape, data)


@given(st.integers(0, 4), st.binary(max_size=40))
@example(1, b"\xff\xff\xff\xff")
def test_any_data_is_unpacked_whole_or_refused(count: int, data: bytes) -> None:
    try:
        tensor = unpack_bytes((count,), data)
    except TensorDataError:
        return

    assert data == pack_bytes(tensor)


def test_text_and_other_buffers_are_packed_as_their_bytes() -> None:
    elements = np.array(["\u00e9", bytearray(b"x"), memoryview(b"y")], dtype=object)

    assert [b"\xc3\xa9", b"x", b"y"] == unpack_bytes((3,), pack_bytes(elements)).tolist()


@pytest.mark.parametrize("dtype", ["S3", "U3"])
def test_fixed_width_texts_are_packed(dtype: str) -> None:
    tensor = np.array(["a", "bcd"]).astype(dtype)

    assert [b"a", b"bcd"] == unpack_bytes((2,), pack_bytes(tensor)).tolist()


@pytest.mark.parametrize("element", [5, None, 1.5])
def test_element_that_is_no_text_cannot_be_packed(element: object) -> None:
    with pytest.raises(TensorDataError, match="expected elements of bytes or text, got "):
        pack_bytes(np.array([element], dtype=object))


# --- typed elements ---------------------------------------------------------------------------


@given(_raw_tensors())
def test_elements_make_the_array_that_they_came_from(
    raw: tuple[Datatype, tuple[int, ...], bytes],
) -> None:
    datatype, shape, data = raw
    tensor = from_bytes(datatype, shape, data)

    again = from_elements(datatype, shape, tensor.ravel().tolist())

    assert datatype.dtype == again.dtype
    assert str(tensor.tolist()) == str(again.tolist())  # as texts, so that NaN is NaN


@pytest.mark.parametrize("datatype", DATATYPES.values(), ids=str)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_number_of_elements_must_be_that_of_the_shape(datatype: Datatype, count: int) -> None:
    elements = [b""] * count if datatype is BYTES else [0] * count
    text = rf"expected 2 elements for {datatype}\[2\], got {count} elements"
    with pytest.raises(TensorDataError, match=text):
        from_elements(datatype, (2,), elements)


@pytest.mark.parametrize("datatype", INTEGERS, ids=str)
@pytest.mark.parametrize("as_array", [False, True])
def test_integer_at_the_limits_is_taken(datatype: Datatype, as_array: bool) -> None:
    limits = np.iinfo(datatype.dtype)
    elements = [limits.min, limits.max]

    given_elements = np.array(elements, datatype.dtype) if as_array else elements

    assert elements == from_elements(datatype, (2,), given_elements).tolist()


@pytest.mark.parametrize("datatype", INTEGERS, ids=str)
@pytest.mark.parametrize("beyond", [1, 10**30, 10**5000], ids=["1", "30 digits", "5000 digits"])
def test_integer_beyond_the_limits_is_refused(datatype: Datatype, beyond: int) -> None:
    limits = np.iinfo(datatype.dtype)
    expected = f"expected {datatype} between {limits.min} and {limits.max}, got "

    for outside in (limits.min - beyond, limits.max + beyond):
        with pytest.raises(TensorDataError, match=expected):
            from_elements(datatype, (2,), [0, outside])


def test_wide_array_of_integers_is_checked_before_it_is_narrowed() -> None:
    with pytest.raises(TensorDataError, match="INT8 between -128 and 127, got 300"):
        from_elements(DATATYPES["INT8"], (1,), np.array([300]))
    with pytest.raises(TensorDataError, match="got 18446744073709551615"):
        from_elements(DATATYPES["INT64"], (1,), np.array([2**64 - 1], dtype=np.uint64))


@pytest.mark.parametrize("name", ["FP16", "BF16", "FP32"])
@pytest.mark.parametrize("outside", [1e39, -1e39, 10**400], ids=["high", "low", "huge"])
def test_finite_number_stays_finite(name: str, outside: float) -> None:
    with pytest.raises(TensorDataError, match=f"expected {name}, got a number out of range"):
        from_elements(DATATYPES[name], (1,), [outside])


@pytest.mark.parametrize("datatype", FLOATS, ids=str)
def test_infinity_and_nan_are_numbers(datatype: Datatype) -> None:
    tensor = from_elements(datatype, (3,), [float("inf"), float("-inf"), float("nan")])

    assert [True, True, False] == np.isinf(tensor).tolist()
    assert np.isnan(tensor[2])


def test_integer_may_stand_for_a_float() -> None:
    assert [1.0, 2.5] == from_elements(DATATYPES["FP32"], (2,), [1, 2.5]).tolist()


@pytest.mark.parametrize(
    ("name", "element"),
    [
        ("BOOL", 1),
        ("BOOL", "true"),
        ("INT32", True),
        ("INT32", 1.0),
        ("INT32", "1"),
        ("INT32", None),
        ("UINT64", [1]),
        ("FP32", True),
        ("FP32", "1"),
        ("FP32", None),
        ("BF16", b"1"),
        ("BYTES", 1),
        ("BYTES", None),
    ],
)
def test_element_of_another_kind_is_refused(name: str, element: object) -> None:
    with pytest.raises(TensorDataError, match=f"got {type(element).__name__}"):
        from_elements(DATATYPES[name], (1,), [element])


def test_array_of_the_datatype_is_taken_as_it_is() -> None:
    elements = np.ones(4, dtype=np.float32)

    assert np.shares_memory(elements, from_elements(DATATYPES["FP32"], (2, 2), elements))


def test_texts_are_kept_as_bytes() -> None:
    assert [b"\xc3\xa9", b"x"] == from_elements(BYTES, (2,), ["\u00e9", b"x"]).tolist()


@pytest.mark.parametrize("beyond", [10**24 - 1, 1 - 10**24, 10**24, -(10**24)])
def test_a_number_of_up_to_24_digits_is_shown(beyond: int) -> None:
    with pytest.raises(TensorDataError) as caught:
        from_elements(DATATYPES["INT8"], [1], [beyond])

    shown = str(beyond) if abs(beyond) < 10**24 else "a number with more digits"
    assert shown == caught.value.got


def test_each_element_of_an_array_of_objects_is_checked() -> None:
    elements = np.array([1, 2], object)
    others = np.array([1, "2"], object)

    assert [1, 2] == from_elements(DATATYPES["INT8"], [2], elements).tolist()
    with pytest.raises(TensorDataError, match="expected elements of INT8, got str"):
        from_elements(DATATYPES["INT8"], [2], others)


@pytest.mark.parametrize("given_datatype", FLOATS, ids=str)
@pytest.mark.parametrize("datatype", FLOATS, ids=str)
def test_an_array_of_any_float_has_elements_of_any_other(
    datatype: Datatype, given_datatype: Datatype
) -> None:
    elements = np.array([0.5, -2], given_datatype.dtype)

    assert [0.5, -2] == from_elements(datatype, [2], elements).tolist()
