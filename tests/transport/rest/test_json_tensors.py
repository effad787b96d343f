import gc
import json
import tracemalloc
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from xlaserve.http.json.json_tensors import (
    JsonRules,
    NotInJson,
    NotUtf8,
    quote_not_finite,
    read_elements,
    write_elements,
)
from xlaserve.tensors import BYTES, DATATYPES, Datatype, Tensor, TensorDataError

FP32, FP64, INT8, INT32, BOOL = (DATATYPES[n] for n in ("FP32", "FP64", "INT8", "INT32", "BOOL"))
IN_JSON = [datatype for datatype in DATATYPES.values() if datatype.contents is not None]
BINARY_ONLY = [DATATYPES["FP16"], DATATYPES["BF16"]]


def read(datatype: Datatype, shape: Sequence[int], data: object) -> Tensor:
    return read_elements(datatype, tuple(shape), json.dumps(data).encode())


def refusal(datatype: Datatype, shape: Sequence[int], text: bytes) -> str:
    with pytest.raises(TensorDataError) as caught:
        read_elements(datatype, tuple(shape), text)
    return str(caught.value)


def elements_of(datatype: Datatype) -> st.SearchStrategy[Any]:
    if datatype is BYTES:
        return st.text(max_size=5).map(str.encode)
    if datatype.dtype.kind == "f":
        return npst.from_dtype(datatype.dtype, allow_nan=False, allow_infinity=False)
    return npst.from_dtype(datatype.dtype)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Datatype, Tensor]:
    datatype = draw(st.sampled_from(IN_JSON))
    shape = draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    elements = elements_of(datatype)
    return datatype, draw(npst.arrays(datatype.dtype, shape, elements=elements))


def nested(datatype: Datatype, tensor: Tensor) -> str:
    plain = np.vectorize(bytes.decode, otypes=[object])(tensor) if datatype is BYTES else tensor
    return json.dumps(plain.tolist())


# --- reading -----------------------------------------------------------------------------------


@given(tensors())
def test_nested_data_is_the_tensor(case: tuple[Datatype, Tensor]) -> None:
    """For every datatype and shape, including empty dimensions."""
    datatype, tensor = case

    read = read_elements(datatype, tensor.shape, nested(datatype, tensor).encode())

    assert datatype.dtype == read.dtype
    assert tensor.shape == read.shape
    assert tensor.tolist() == read.tolist()


@given(tensors())
def test_written_data_is_read_as_it_was(case: tuple[Datatype, Tensor]) -> None:
    """Exact to the bit, including the signs of zeros."""
    datatype, tensor = case

    text = b"".join(write_elements(datatype, tensor))
    read = read_elements(datatype, tensor.shape, text)

    assert tensor.shape == read.shape
    assert tensor.tolist() == read.tolist()
    if datatype is not BYTES:
        assert tensor.tobytes() == read.tobytes()
    assert isinstance(json.loads(text), list)


@pytest.mark.parametrize(
    "data",
    [
        [1, 2, 3, 4, 5, 6],
        [[1, 2, 3], [4, 5, 6]],
        [[1, 2], [3, 4], [5, 6]],
        [[[[1, 2, 3, 4, 5, 6]]]],
    ],
)
def test_data_nests_in_any_regular_way(data: object) -> None:
    """Only the number of elements must match the shape (KServe REST API, Inference)."""
    assert [[1, 2], [3, 4], [5, 6]] == read(INT32, (3, 2), data).tolist()


@pytest.mark.parametrize(
    "text", [b" [ [1 ,\t2] ,\r\n[ 3,4 ] ] ", b"[[1,2],[3,4]]", b"[[1\n,2],[3,4]]"]
)
def test_whitespace_does_not_matter(text: bytes) -> None:
    assert [1.0, 2.0, 3.0, 4.0] == read_elements(FP32, (4,), text).tolist()


IRREGULAR = [
    "[[1,2],[3]]",
    "[[1],[2,3]]",
    "[[1,2],3]",
    "[1,[2,3]]",
    "[[1,2,3],[]]",
    "[[],[1,2,3]]",
    "[[[1]],[2],[[3]]]",
    "[[[1,2]],[[3],[4]]]",
    "[[[1],[2]],[[3,4]]]",
    "[[1,2],[[3]]]",
    "[[[3]],[1,2]]",
    "[[],[[]]]",
    "[[[]],[]]",
    "[[],1]",
    "[[1],[]]",
    "[[1],[],[2]]",
    "[[1],[ ]]",
    "[[[1]],[[]]]",
    "[1,[]]",
]


@pytest.mark.parametrize("datatype", [FP32, INT32, BYTES], ids=str)
@pytest.mark.parametrize("text", IRREGULAR)
@pytest.mark.parametrize("count", range(5))
def test_irregular_nesting_is_refused(datatype: Datatype, text: str, count: int) -> None:
    """Even if the number of elements matches."""
    if datatype is BYTES:
        text = text.replace("1", '"]"').replace("2", '"[,"').replace("3", '"a"')

    assert "expected" in refusal(datatype, (count,), text.encode())


@pytest.mark.parametrize("datatype", [INT32, FP32, BYTES], ids=str)
@given(
    data=st.recursive(
        st.sampled_from(["0", "1"]), lambda inner: st.lists(inner, max_size=2), max_leaves=8
    )
)
def test_what_numpy_refuses_is_refused(datatype: Datatype, data: Any) -> None:
    """Numpy is strict about lists of different lengths; so are we, whatever number is promised."""
    written = json.dumps(data) if datatype is BYTES else json.dumps(data).replace('"', "")
    try:
        array = np.array(data, dtype=np.str_)
    except ValueError:
        for count in range(9):
            refusal(datatype, (count,), written.encode())
        return

    if array.ndim:
        read = read_elements(datatype, (array.size,), written.encode())
        assert [int(text) for text in array.ravel()] == [int(element) for element in read]
    else:
        assert "data in a list" in refusal(datatype, (1,), written.encode())


def test_the_only_element_of_a_tensor_without_dimensions_may_stand_alone() -> None:
    assert 5 == read(INT32, (), 5) == read(INT32, (), [5]) == read(INT32, (), [[5]])
    assert b"a]" == read(BYTES, (), "a]").item()


@pytest.mark.parametrize(
    ("data", "got"), [([], 0), ([[], []], 0), ([1], 1), ([[1, 2], [3, 4]], 4), ([1, 2, 3, 4, 5], 5)]
)
def test_the_number_of_elements_is_that_of_the_shape(data: object, got: int) -> None:
    """The error has the same text as for typed contents over gRPC."""
    text = json.dumps(data).encode()

    assert f"expected 3 elements for FP32[3,1], got {got} elements" == refusal(FP32, (3, 1), text)


@pytest.mark.parametrize(
    ("datatype", "text", "message"),
    [
        (INT8, "[127,128]", "expected INT8 between -128 and 127, got 128"),
        (INT8, "[-129,0]", "expected INT8 between -128 and 127, got -129"),
        (INT32, f"[0,{2**64}]", f"got {2**64}"),
        (INT32, f"[0,{10**300}]", "got a number with more digits"),
        (INT32, "[1.0,2]", "expected elements of INT32, got float"),
        (INT32, "[1e2,2]", "expected elements of INT32, got float"),
        (INT32, "[true,2]", "expected elements of INT32, got bool"),
        (INT32, "[null,2]", "expected elements of INT32, got NoneType"),
        (INT32, '["1",2]', "expected elements of INT32, got str"),
        (INT32, '["NaN",2]', "expected elements of INT32, got float"),
        (INT32, '[{"a":[1,2]},2]', "expected elements of INT32, got str"),
        (INT32, "[{},2]", "expected elements of INT32, got dict"),
        (BOOL, "[1,true]", "expected elements of BOOL, got int"),
        (BOOL, "[0.0,true]", "expected elements of BOOL, got float"),
        (FP32, "[true,1]", "expected elements of FP32, got bool"),
        (FP32, "[null,1]", "expected elements of FP32, got NoneType"),
        (FP32, '["1","2"]', "expected elements of FP32, got str"),
        (FP32, "[1e39,1]", "expected FP32, got a number out of range"),
        (FP32, "[1e400,1]", "expected FP32, got a number out of range"),
        (FP64, "[-1e400,1]", "expected FP64, got a number out of range"),
        (FP64, f"[{10**400},1]", "expected FP64, got a number out of range"),
        (FP32, '["NaN",1]', "finite elements of FP32 in JSON; send others as binary data"),
        (FP64, '["-Infinity",1]', "got -Infinity"),
        (BYTES, '["a",1]', "expected elements of bytes or text, got int"),
        (BYTES, '["a",null]', "expected elements of bytes or text, got NoneType"),
        (BYTES, '["a",true]', "expected elements of BYTES, got bool"),
        (BYTES, '["a",{"b":1}]', "expected elements of BYTES, got dict"),
        (FP32, "null", "expected data in a list, got no list"),
        (BYTES, '"[1]"', "expected data in a list, got no list"),
    ],
)
def test_elements_of_another_kind_are_refused(datatype: Datatype, text: str, message: str) -> None:
    """No conversions: no fraction to an integer, no number to a boolean, no null."""
    assert message in refusal(datatype, (2,), text.encode())


@pytest.mark.parametrize("datatype", BINARY_ONLY, ids=str)
def test_half_precision_is_only_binary(datatype: Datatype) -> None:
    """As over gRPC (V2 protocol, Tensor Data Types)."""
    message = refusal(datatype, (1,), b"[1.0]")

    assert f"binary data (binary_data_size), the only encoding of {datatype}" in message


def test_integers_are_elements_of_float_tensors() -> None:
    assert [0.0, -3.0, 2.0**70] == read(FP64, (3,), [0, -3, 2**70]).tolist()


def test_texts_are_kept_as_utf8_whatever_is_in_them() -> None:
    texts = ["", "a,b", "[]{}", 'say "\\"', "é日\U0001f600", "\0\n", "NaN"]

    assert [text.encode() for text in texts] == read(BYTES, (7,), texts).tolist()
    assert [text.encode() for text in texts] == read(BYTES, (7,), [[t] for t in texts]).tolist()


def test_bytes_that_are_not_utf8_are_refused_with_what_to_send_instead() -> None:
    assert "binary data (binary_data_size)" in refusal(BYTES, (1,), b'["\xff"]')


@pytest.mark.parametrize("digits", [10_000, 1_000_000])
@pytest.mark.parametrize("datatype", [INT32, FP64], ids=str)
def test_endless_numbers_are_refused(datatype: Datatype, digits: int) -> None:
    assert "a number out of range" in refusal(datatype, (1,), b"[" + b"1" * digits + b"]")


@pytest.mark.parametrize("datatype", [d for d in IN_JSON if d is not BYTES], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 100_000])
def test_long_data_is_read_in_pieces(datatype: Datatype, rows: int) -> None:
    """For data of any kind; an error in the last element is found."""
    tensor = (np.arange(rows * 3) % 100).astype(datatype.dtype).reshape(rows, 3)
    text = json.dumps(tensor.tolist()).encode()

    assert tensor.tolist() == read_elements(datatype, tensor.shape, text).tolist()
    assert "got str" in refusal(datatype, tensor.shape, text[:-2] + b',"x"]]')
    assert "got NoneType" in refusal(datatype, (rows, 4), add_column(text, b"null"))


def add_column(text: bytes, element: bytes) -> bytes:
    return text.replace(b"]", b"," + element + b"]", text.count(b"]") - 1)


@pytest.mark.parametrize("empty", [b"[]", b"[ ]", b"[" + b" " * 300_000 + b"]"])
@pytest.mark.parametrize("before", range(131_071, 131_075))
@pytest.mark.parametrize("after", [b"", b",[0]"])
def test_an_empty_list_where_long_data_is_cut_is_irregular(
    before: int, empty: bytes, after: bytes
) -> None:
    """Every element of the result was sent."""
    text = b"[" + b"[0]," * before + empty + after + b"]"

    message = refusal(FP32, (before + 1 + bool(after),), text)

    assert message.endswith("got lists of different lengths")


@pytest.mark.parametrize("text", [b"[" + b"[]," * 300_000 + b"[]]", b"[" + b"0," * 500_000 + b"0]"])
@pytest.mark.parametrize("datatype", [INT32, FP32, BYTES], ids=str)
def test_more_elements_than_the_shape_has_are_never_built(datatype: Datatype, text: bytes) -> None:
    """They are counted first; a list takes thirty times the memory of its text."""
    gc.collect()
    tracemalloc.start()
    try:
        refusal(datatype, (1, 2), text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 5 * len(text)


@pytest.mark.parametrize(
    "shape", [(10**18, 10**18), (2**63 - 1,), (-1,), (1,) * 65, (0, 2**63 - 1)]
)
def test_shapes_that_no_array_has_are_refused(shape: tuple[int, ...]) -> None:
    assert refusal(FP32, shape, b"[1]")
    assert refusal(BYTES, shape, b'["a"]')


@pytest.mark.parametrize("datatype", [FP32, FP64, INT32, BYTES], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        shape
        for dimensions in (1, 2, 3)
        for shape in product((-2, -1, 1, 2), repeat=dimensions)
        if min(shape) < 0
    ],
)
def test_a_negative_size_is_refused_though_the_product_is_the_number_of_elements(
    datatype: Datatype, shape: tuple[int, ...]
) -> None:
    elements = ["a" if datatype is BYTES else 1] * abs(prod(shape))

    assert refusal(datatype, shape, json.dumps(elements).encode())


# --- NaN and Infinity --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        (b"[1]", None),
        (b'["NaN","Infinity\\""]', None),
        (b"[NaN]", b'["NaN"]'),
        (b"[1,-Infinity,NaN,Infinity]", b'[1,"-Infinity",0  ,0       ]'),
        (b'["NaN",Infinity,"-Infinity",-Infinity]', b'["NaN","Infinity","-Infinity",-0       ]'),
    ],
)
def test_the_first_number_that_is_not_finite_becomes_a_string(
    text: bytes, quoted: bytes | None
) -> None:
    assert quoted == quote_not_finite(text)


# --- writing -----------------------------------------------------------------------------------


def test_long_data_is_written_in_pieces_that_make_one_list() -> None:
    tensor = np.random.default_rng(0).standard_normal((50_000, 2)).astype(np.float32)

    pieces = write_elements(FP32, tensor)

    assert len(pieces) > 1
    read = np.array(json.loads(b"".join(pieces)), np.float32)
    assert tensor.ravel().tobytes() == read.tobytes()


def test_numbers_have_as_few_digits_as_tell_them_apart() -> None:
    """A tenth in FP32 differs from that in FP64; both round-trip exactly (JSON, RFC 8259 6)."""
    tenths = [0.1, 1.0, -0.0, 1e-7, 16777216.0]

    single = b"".join(write_elements(FP32, np.array(tenths, np.float32)))
    double = b"".join(write_elements(FP64, np.array([0.1, 0.10000000149011612])))

    assert b"[0.1,1.0,-0.0,1e-7,16777216.0]" == single
    assert b"[0.1,0.10000000149011612]" == double


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_no_elements_are_an_empty_list(shape: tuple[int, ...]) -> None:
    assert [b"[]"] == write_elements(FP32, np.zeros(shape, np.float32))


def test_elements_are_written_in_row_major_order() -> None:
    tensor = np.arange(6, dtype=np.int32).reshape(2, 3).T

    assert [b"[0,3,1,4,2,5]"] == write_elements(INT32, tensor)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("datatype", [FP32, FP64], ids=str)
def test_strict_json_has_no_numbers_that_are_not_finite(datatype: Datatype, number: float) -> None:
    """JSON has no such numbers, and null would be read as something else."""
    with pytest.raises(NotInJson, match="NaN or Infinity"):
        write_elements(datatype, np.array([1.0, number], datatype.dtype), JsonRules(strict=True))


@pytest.mark.parametrize("count", [2, 40_000])
@pytest.mark.parametrize("datatype", [FP32, FP64], ids=str)
def test_numbers_that_are_not_finite_are_literals_of_python(datatype: Datatype, count: int) -> None:
    tensor = np.full((2, count), 0.1, datatype.dtype)
    tensor[0, 0], tensor[1, 0], tensor[1, 1] = np.nan, np.inf, -np.inf
    text = b"".join(write_elements(datatype, tensor))

    assert text.startswith(b"[NaN,")
    assert (1, 1) == (text.count(b",Infinity,"), text.count(b",-Infinity"))
    np.testing.assert_array_equal(tensor.ravel(), np.array(json.loads(text), datatype.dtype))


@pytest.mark.parametrize("datatype", BINARY_ONLY, ids=str)
def test_half_precision_is_not_written(datatype: Datatype) -> None:
    with pytest.raises(TensorDataError, match=f"binary_data, the only encoding of {datatype}"):
        write_elements(datatype, np.zeros(2, datatype.dtype))


@pytest.mark.parametrize("element", [b"\xff", b"a\xed\xa0\x80", "\ud800"])
def test_bytes_that_are_no_text_are_refused_or_surrogates(element: bytes | str) -> None:
    tensor = np.array([b"a", element], dtype=object)
    for rules in (JsonRules(), JsonRules(strict=True)):
        with pytest.raises(NotUtf8):
            write_elements(BYTES, tensor, rules)
    text = b"".join(write_elements(BYTES, tensor, JsonRules(surrogates=True)))
    _, read = json.loads(text)

    assert text.isascii()
    assert element == (read if isinstance(element, str) else read.encode(errors="surrogateescape"))


def test_texts_of_a_model_are_written_as_texts() -> None:
    """A BYTES output of a model may hold str as well as bytes."""
    pieces = write_elements(BYTES, np.array(["é", b'"', ""], dtype=object))

    assert ["é", '"', ""] == json.loads(b"".join(pieces))
