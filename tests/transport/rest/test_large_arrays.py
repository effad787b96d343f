"""Large arrays are read in pieces with the same result; unusual ones use the general reader."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from xlaserve.errors import InvalidRequest
from xlaserve.http.json import json_numbers, large_arrays
from xlaserve.http.json.large_arrays import cut_arrays, read_array
from xlaserve.http.messages import JSON_TYPE
from xlaserve.http.sagemaker import plain_tensors
from xlaserve.http.sagemaker.plain_tensors import read_plain_request
from xlaserve.http.v2 import infer_request
from xlaserve.http.v2.infer_request import read_infer_request
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.inference import InferRequest
from xlaserve.tensors import DATATYPES, MAX_DIMENSIONS, Datatype, Tensor, TensorSpec

DEPTH = 12
FP32 = DATATYPES["FP32"]
X = TensorSpec("x", FP32, (-1, -1))
NUMERIC = [row for row in DATATYPES.values() if row.contents and row.dtype.kind in "fiu"]
TEXTS = st.sampled_from([*'[],{}":0123456789.eE+- \n\\', '"x"', "null", "true", "NaN", "[["])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat arrays of a few bytes as large, and read them in pieces of a few bytes."""
    monkeypatch.setattr(large_arrays, "LARGE_BYTES", 12)
    monkeypatch.setattr(large_arrays, "_PIECE_BYTES", 7)
    monkeypatch.setattr(large_arrays, "_HEAD_BYTES", 9)


def model_of(datatype: Datatype) -> ModelInfo:
    specs = tuple(TensorSpec(name, datatype, (-1, -1)) for name in "xy")
    return ModelInfo("jax", specs, specs, 0)


def outcome(info: ModelInfo, body: bytes, *, large: bool) -> object:
    """Return the parsed body, with large arrays cut out or all in one piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infer_request, "LARGE_BYTES", 0 if large else 1 << 40)
        patch.setattr(infer_request, "_SHORT_BYTES", 0)
        try:
            request = read_infer_request(info, "m", "", memoryview(body), None, max_depth=DEPTH)
        except InvalidRequest as error:
            return type(error), str(error)
    return described(request)


def described(request: InferRequest) -> object:
    inputs = [
        (i.name, i.datatype.name, i.data.shape, i.data.dtype.str, i.data.tobytes(), i.parameters)
        for i in request.inputs
    ]
    return request.id, inputs, request.outputs, request.parameters


def was_cut(info: ModelInfo, body: bytes) -> bool:
    """Tell whether the reader of large arrays handles a body without the general reader."""
    reader = infer_request._Reader(info, "m", "", None)
    return infer_request._read_large(reader, memoryview(body), DEPTH) is not None


@st.composite
def requests(draw: st.DrawFn) -> tuple[ModelInfo, bytes]:
    datatype = draw(st.sampled_from(NUMERIC))
    inputs: list[dict[str, Any]] = []
    for name in draw(st.sampled_from(["x", "xy"])):
        shape = draw(npst.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=5))
        elements = (
            npst.from_dtype(datatype.dtype, allow_nan=False, allow_infinity=False)
            if datatype.dtype.kind == "f"
            else npst.from_dtype(datatype.dtype)
        )
        data = draw(npst.arrays(datatype.dtype, shape, elements=elements))
        listed = data.tolist() if draw(st.booleans()) else data.ravel().tolist()
        row = {"name": name, "shape": shape, "datatype": datatype.name, "data": listed}
        inputs.append(dict(draw(st.permutations(list(row.items())))))
    message: dict[str, Any] = {"inputs": inputs}
    if draw(st.booleans()):
        message |= {"id": 'a"[1,2,3]\\', "parameters": {"p": '":[1,2,3,4,5]'}}
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]))
    return model_of(datatype), json.dumps(message, separators=separators).encode()


@given(requests())
def test_requests_are_read_as_they_are_in_one_piece(case: tuple[ModelInfo, bytes]) -> None:
    """For all numeric datatypes, nested or flat, with or without whitespace (KServe REST API)."""
    info, body = case

    assert outcome(info, body, large=False) == outcome(info, body, large=True)


@pytest.mark.skipif(not json_numbers.READS_ARRAYS, reason="simdjson is not there")
@pytest.mark.parametrize("data", [[[1.5, 2.5], [3.5, 4.5]], [1.5, 2.5, 3.5, 4.5]])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_what_clients_send_is_cut(data: object, separators: tuple[str, str]) -> None:
    """As python's json writes it, and without whitespace."""
    row = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": data}
    body = json.dumps({"inputs": [row]}, separators=separators).encode()

    assert was_cut(model_of(FP32), body)


BODY = b'{"inputs":[{"name":"x","shape":[2,2],"datatype":"FP32","data":%b}]}'


@given(requests(), st.data())
@example(
    (model_of(FP32), b'{"inputs":[{"name":"x","shape":[2,1],"datatype":"FP32","data":[[1],2[]]}]}'),
    None,
)
def test_damaged_requests_are_judged_as_they_are_in_one_piece(
    case: tuple[ModelInfo, bytes], data: st.DataObject | None
) -> None:
    """They get the same error or the same result, with damage at hundreds of positions."""
    info, body = case
    damaged = bytearray(body)
    if data is not None:
        for _ in range(data.draw(st.integers(1, 3))):
            start = data.draw(st.integers(0, len(damaged)))
            stop = min(len(damaged), start + data.draw(st.integers(0, 3)))
            damaged[start:stop] = data.draw(TEXTS).encode()

    assert outcome(info, bytes(damaged), large=False) == outcome(info, bytes(damaged), large=True)


@pytest.mark.parametrize(
    "data",
    [
        "[[1],[2]3]",
        "[[1],2[]]",
        "[[1],2 []]",
        "[[1],2[ ]]",
        "[[1 2],[3]]",
        "[[1],[,2]]",
        "[[1,],[2]]",
        "[[1,2],3[,4]]",
        "[[1,]2,[3,4]]",
        "[1,,2,3]",
        "[,1,2,3,4]",
        "[1,2,3,4,]",
        "[1 ,2,3 4]",
        "[[1,2],[3,4]",
        "[1,2],[3,4]",
        "[[1,2],[3]]",
        "[[[1,2]],[3,4]]",
        "[1,2,3,4}",
        "[1,2,{},4]",
        "[1,2,null,4]",
        "[1,2,true,4]",
        "[01,2,3,4]",
        "[1.,2,3,4]",
        "[+1,2,3,4]",
        "[1,2,3,NaN]",
        "[1,2,3,1e39]",
        "[1,2,3]",
        "[1,2,3,4,5]",
        "[              ]",
        "[[],[],[],[]]",
    ],
)
def test_what_is_no_plain_list_of_numbers_is_not_taken(data: str) -> None:
    body = BODY % data.encode()

    assert not was_cut(model_of(FP32), body)
    assert outcome(model_of(FP32), body, large=False) == outcome(model_of(FP32), body, large=True)


@pytest.mark.parametrize("digits", range(1, 16))
def test_it_does_not_matter_where_an_array_is_divided(digits: int) -> None:
    """The piece boundary falls on every byte once."""
    one = b"1" * digits

    for damaged in (b"[[%b,2],3[,4]]", b"[[%b,]2,[3,4]]", b"[%b,          ,3]", b"[,%b,2]"):
        assert read_array(FP32, None, memoryview(damaged % one), MAX_DIMENSIONS) is None
    whole = read_array(DATATYPES["INT64"], None, memoryview(b"[[%b,2],[3,4]]" % one), 3)
    assert whole is not None
    assert [[int(one), 2], [3, 4]] == whole.tolist()


@pytest.mark.parametrize("text", [b"[          ]", b"[[       ]]", b"[]"])
def test_an_empty_list_is_not_taken(text: bytes) -> None:
    """Counting commas cannot distinguish it from a list of one element."""
    assert read_array(FP32, None, memoryview(text), MAX_DIMENSIONS) is None


def test_what_lies_beside_instances_is_checked_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain_tensors, "LARGE_BYTES", 0)
    info = ModelInfo("jax", (X,), (X,), 0)
    body = b'{"instances":[[1.5,2.5,3.5,4.5]],"other":[1,2,,3,4,5,6,7]}'

    with pytest.raises(InvalidRequest):
        read_plain_request(info, "m", JSON_TYPE, memoryview(body))


@pytest.mark.parametrize(
    "body",
    [
        b'{"other":[1,2,,3,4,5,6,7],"inputs":[]}',
        b'{"inputs":[{"name":"x","shape":[4],"datatype":"FP32","data":[1.5,2.5,3.5,4.5],"also":[5,,6,7,8,9,10]}]}',
        b'{"inputs":[{"name":"x","shape":[4],"datatype":"FP32","data":[1.5,2.5,,4.5],"data":[1.5,2.5,3.5,4.5]}]}',
        b'{"inputs":[{"name":"x","shape":[4],"datatype":"FP32","parameters":{"p":[1,2,,4,5,6,7,8]}}]}',
        b'{"inputs":[{"name":"x","shape":[1,,1,1,1,1,1,1],"datatype":"FP32","data":[1.0]}]}',
    ],
)
def test_an_array_that_is_not_read_is_checked_all_the_same(body: bytes) -> None:
    """Its key is unknown, or is repeated later."""
    assert not was_cut(model_of(FP32), body)
    assert InvalidRequest in outcome(model_of(FP32), body, large=True)[0].__mro__  # type: ignore[index]


def test_arrays_may_not_be_nested_deeper_than_the_limit() -> None:
    levels = DEPTH - 2
    body = BODY.replace(b"[2,2]", b"[1]") % (b"[" * levels + b"1.5" + b"]" * levels)

    assert not was_cut(model_of(FP32), body)
    assert "max_json_depth" in str(outcome(model_of(FP32), body, large=True))


@given(
    npst.arrays(np.float32, npst.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=6)),
    st.booleans(),
)
def test_a_bare_list_has_the_shape_of_its_lists(tensor: Tensor, is_object: bool) -> None:
    """As SageMaker's clients send it, alone or as `instances`."""
    tensor = np.nan_to_num(tensor)
    value: object = {"instances": tensor.tolist()} if is_object else tensor.tolist()
    info = ModelInfo("jax", (X,), (X,), 0)
    results = []
    for limit in (0, 1 << 40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plain_tensors, "LARGE_BYTES", limit)
            body = memoryview(json.dumps(value).encode())
            results.append(described(read_plain_request(info, "m", JSON_TYPE, body)))

    assert results[0] == results[1]


def test_a_marker_cannot_be_written_beforehand() -> None:
    """Each document has its own marker of 16 random bytes."""
    body = memoryview(BODY % b"[1.5,2.5,3.5,4.5]")

    cuts = [cut_arrays(body) for _ in range(8)]
    markers = {marker for cut in cuts if cut is not None for marker in cut.arrays}

    assert 8 == len(markers)
    assert all(len(marker) > 32 for marker in markers)


@pytest.mark.parametrize("reads_arrays", [True, False])
def test_numbers_are_read_without_simdjson_too(
    reads_arrays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_numbers, "READS_ARRAYS", reads_arrays)

    read = outcome(model_of(FP32), BODY % b"[[1,2],[3,4]]", large=True)

    assert outcome(model_of(FP32), BODY % b"[1,2,3,4]", large=False) == read


def test_integers_keep_all_their_digits() -> None:
    array = memoryview(b"[9223372036854775807, -9223372036854775808]")
    unsigned = memoryview(b"[18446744073709551615, 9007199254740993]")

    signed = read_array(DATATYPES["INT64"], None, array, MAX_DIMENSIONS)
    assert signed is not None
    assert [2**63 - 1, -(2**63)] == signed.tolist()
    read = read_array(DATATYPES["UINT64"], (2,), unsigned, MAX_DIMENSIONS)
    assert read is not None
    assert [2**64 - 1, 2**53 + 1] == read.tolist()
    assert read_array(DATATYPES["INT64"], None, unsigned, MAX_DIMENSIONS) is None
    assert read_array(DATATYPES["INT8"], None, memoryview(b"[1,128]"), MAX_DIMENSIONS) is None
