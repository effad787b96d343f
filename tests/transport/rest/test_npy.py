""".npy files, and files that only look like them."""

import io
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from xlaserve.errors import InvalidBody
from xlaserve.http.sagemaker.npy import read_npy, write_npy
from xlaserve.tensors import DATATYPES, TensorDataError, datatype_of

FP32, BYTES = DATATYPES["FP32"], DATATYPES["BYTES"]
DTYPES = [row.dtype for row in DATATYPES.values() if row is not BYTES]


def saved(array: Any, version: tuple[int, int] | None = None) -> memoryview:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), version=version)
    return memoryview(file.getvalue())


@given(st.sampled_from(DTYPES), arrays.array_shapes(min_dims=0, min_side=0), st.booleans())
def test_what_numpy_writes_is_read(dtype: Any, shape: tuple[int, ...], fortran: bool) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    datatype = datatype_of(dtype)
    assert datatype is not None
    read = read_npy(datatype, saved(np.asfortranarray(array) if fortran and shape else array))

    assert (shape, dtype) == (read.shape, read.dtype)
    np.testing.assert_array_equal(array, read)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_is_read(version: tuple[int, int]) -> None:
    assert [1, 2] == read_npy(FP32, saved(np.array([1, 2], np.float32), version)).tolist()


@given(st.sampled_from(DTYPES), arrays.array_shapes(min_dims=0, min_side=0))
def test_what_is_written_numpy_reads(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    file = b"".join(write_npy(array))
    read = np.lib.format.read_array(io.BytesIO(file), allow_pickle=False)

    np.testing.assert_array_equal(array, read.view(dtype))


def test_a_view_is_not_copied() -> None:
    body = saved(np.zeros(1000, np.float32))

    assert np.shares_memory(np.frombuffer(body, np.uint8), read_npy(FP32, body))


@pytest.mark.parametrize("texts", [[b"a", b"\xff"], ["a", "ключ"]])
def test_strings_are_elements_of_bytes(texts: list[Any]) -> None:
    expected = [text if isinstance(text, bytes) else text.encode() for text in texts]

    assert expected == read_npy(BYTES, saved(texts)).tolist()


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}",
        '{"shape": (2, ), "fortran_order": False, "descr": "<f4"}\n',
    ],
)
def test_other_writers_order_and_quote_as_they_like(header: str) -> None:
    assert (2,) == read_npy(FP32, file(header, bytes(8))).shape


def file(header: str, data: bytes = b"") -> memoryview:
    text = header.encode("latin1")
    return memoryview(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data)


def described(descr: str = "<f4", shape: str = "(2,)", order: str = "False") -> memoryview:
    header = f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}"
    return file(header, bytes(8))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPX\x01\x00" + bytes(100),
        b"\x93NUMPY\x09\x00" + bytes(100),
        b"\x93NUMPY\x01\x00\xff\xff" + bytes(100),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100),
        b"PK\x03\x04" + bytes(100),
        bytes(file("{}")),
        bytes(file("{'descr': '<f4', 'fortran_order': False, 'shape': (0,), }" + " " * 4096)),
        bytes(file("__import__('os').system('true')")),
        bytes(described("|O")),
        bytes(described("<f3")),
        bytes(described("|S0")),
        bytes(described("<M8[s]")),
        bytes(described(shape="(2 2)")),
        bytes(described(shape="(-2,)")),
        bytes(described(shape=f"({'9' * 19},)")),
        bytes(saved(np.zeros(1, np.dtype([("a", "<f4")])))),
    ],
)
def test_what_is_no_such_file_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidBody):
        read_npy(FP32, memoryview(body))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (saved(np.zeros(2)), r"expected FP32, got float64\[2\]"),
        (saved(np.zeros(2, ">f4")), r"expected FP32, got >f4\[2\]"),
        (saved(["a"]), r"expected FP32, got <U1\[1\]"),
        (described(shape="(3,)"), r"expected 12 bytes for FP32\[3\], got 8 bytes"),
        (described(shape=f"({'9' * 18},)"), "bytes"),
        (described(shape="(" + "1," * 65 + ")"), "expected at most 64 dimensions, got 65"),
    ],
)
def test_elements_are_those_of_the_model(body: memoryview, text: str) -> None:
    """No conversions; a header with a wrong size allocates nothing."""
    with pytest.raises(TensorDataError, match=text):
        read_npy(FP32, body)


def test_strings_end_where_their_number_says() -> None:
    with pytest.raises(TensorDataError, match="expected elements of 3 bytes, got 8 bytes"):
        read_npy(BYTES, described("|S3"))
    with pytest.raises(TensorDataError, match="expected 2 elements"):
        read_npy(BYTES, described("|S8"))


def test_bfloat16_is_what_numpy_has_no_name_for() -> None:
    array = np.array([1.5], ml_dtypes.bfloat16)

    assert [1.5] == read_npy(DATATYPES["BF16"], saved(array)).astype(float).tolist()


@given(st.binary(max_size=300), st.integers(0, 200))
def test_whatever_the_bytes_are(noise: bytes, at: int) -> None:
    """Reading returns an array or raises one of two errors."""
    body = bytearray(saved(np.zeros((2, 3), np.float32)))
    body[at : at + len(noise)] = noise
    with suppress(InvalidBody, TensorDataError):
        read_npy(FP32, memoryview(body))
