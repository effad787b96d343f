"""Bare tensors as requests and answers."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from xlaserve.errors import (
    InvalidBody,
    InvalidRequest,
    InvalidTensor,
    NotAcceptable,
    OutputNotInForm,
    OutputNotText,
    UnsupportedMediaType,
)
from xlaserve.http.json.json_tensors import DEFAULT_RULES, JsonRules
from xlaserve.http.messages import HttpResponse
from xlaserve.http.sagemaker import plain_tensors
from xlaserve.http.sagemaker.npy import write_npy
from xlaserve.http.sagemaker.plain_tensors import (
    choose_form,
    read_plain_request,
    write_plain_response,
)
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.inference import InferOutput, InferResponse
from xlaserve.tensors import DATATYPES, Tensor, TensorSpec, datatype_of

JSON, CSV, NPY = "application/json", "text/csv", "application/x-npy"
LINES = "application/jsonlines"


def spec(datatype: str, *shape: int, name: str = "x") -> TensorSpec:
    return TensorSpec(name, DATATYPES[datatype], shape)


def info(*inputs: TensorSpec, outputs: Sequence[TensorSpec] = (), batch: int = 8) -> ModelInfo:
    return ModelInfo("test", inputs, tuple(outputs), batch)


def read(input_spec: TensorSpec, media_type: str, body: bytes | str) -> Tensor:
    data = body.encode() if isinstance(body, str) else body
    request = read_plain_request(info(input_spec), "m", media_type, memoryview(data))
    (tensor,) = request.inputs

    assert ("m", "x") == (request.model_name, tensor.name)
    assert tensor.data.dtype == tensor.datatype.dtype
    return tensor.data


# --- requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("datatype", "body", "expected"),
    [
        ("FP32", "[[1, 2.5], [3, -4e1]]", [[1, 2.5], [3, -40]]),
        ("FP32", ' {"instances": [[1, 2]], "signature_name": "x"}', [[1, 2]]),
        ("FP32", "[1, 2]", [[1, 2]]),
        ("FP32", '{"instances": [1, 2]}', [[1, 2]]),
        ("FP16", "[[1, 2]]", [[1, 2]]),
        ("BF16", "[[1, 2]]", [[1, 2]]),
        ("FP64", "[[0.1, 2]]", [[0.1, 2]]),
        ("INT8", "[[-128, 127]]", [[-128, 127]]),
        ("UINT64", "[[0, 18446744073709551615]]", [[0, 2**64 - 1]]),
        ("BOOL", "[[true, false]]", [[True, False]]),
        ("BYTES", '[["a", "\u00e9"]]', [[b"a", "é".encode()]]),
        ("FP32", "[]", None),
    ],
)
def test_lists_in_json(datatype: str, body: str, expected: Any) -> None:
    """As plain lists, or wrapped as by TensorFlow Serving."""
    tensor = read(spec(datatype, -1, 2), JSON, body)

    assert (expected or []) == tensor.tolist()


@pytest.mark.parametrize(
    ("shape", "body", "expected"),
    [((-1,), "7", [7]), ((), "7", 7), ((1, 1), "7", 7), ((2, 1), "[1, 2]", [1, 2])],
)
def test_a_row_without_the_batch_is_a_batch_of_one(
    shape: tuple[int, ...], body: str, expected: Any
) -> None:
    """If it does not fit as sent, but does without the first dimension."""
    assert expected == read(spec("INT32", *shape), JSON, body).tolist()


@given(
    arrays.arrays(np.float32, arrays.array_shapes(max_side=4), elements=st.floats(-9, 9, width=32))
)
def test_json_of_any_shape_is_read_back(array: Tensor) -> None:
    wanted = spec("FP32", *array.shape)

    np.testing.assert_array_equal(array, read(wanted, JSON, json.dumps(array.tolist())))


@pytest.mark.parametrize(
    ("datatype", "body", "expected"),
    [
        ("FP32", "1,2.5\n3,-4e1\n", [[1, 2.5], [3, -40]]),
        ("FP32", "1,2", [[1, 2]]),
        ("FP32", "\ufeff1, 2 \r\n\r\n3,inf\r\n", [[1, 2], [3, float("inf")]]),
        ("FP16", "1,2", [[1, 2]]),
        ("BF16", "1,2", [[1, 2]]),
        ("INT8", "-128,127", [[-128, 127]]),
        ("UINT64", "0,18446744073709551615", [[0, 2**64 - 1]]),
        ("BOOL", "true,0\nFalse, 1", [[True, False], [False, True]]),
        ("BYTES", 'a,"b, ""c"""\n\n\u00e9,\n', [[b"a", b'b, "c"'], ["é".encode(), b""]]),
    ],
)
def test_rows_of_csv(datatype: str, body: str, expected: Any) -> None:
    assert expected == read(spec(datatype, -1, 2), CSV, body).tolist()


@pytest.mark.parametrize(
    ("shape", "body", "found"),
    [
        ((-1, 4), "1,2,3,4\n1,2,3,4", (2, 4)),
        ((-1, 2, 2), "1,2,3,4\n1,2,3,4", (2, 2, 2)),
        ((-1,), "1\n2\n3", (3,)),
        ((3,), "1,2,3", (3,)),
        ((3,), "1\n2\n3", (3,)),
        ((2, 2), "1,2\n3,4", (2, 2)),
        ((1, 2, 2), "1,2\n3,4", (1, 2, 2)),
        ((-1, -1), "1,2\n3,4", (2, 2)),
        ((-1, 3), "1,2\n3,4", (2, 2)),
    ],
)
def test_a_row_is_an_entry_of_the_batch(
    shape: tuple[int, ...], body: str, found: tuple[int, ...]
) -> None:
    """It is reshaped if entries have more dimensions; the core refuses what does not fit."""
    assert found == read(spec("FP32", *shape), CSV, body).shape


def test_a_file_of_numpy() -> None:
    array = np.arange(4, dtype=np.float32).reshape(2, 2)
    body = b"".join(write_npy(array))

    assert array.tolist() == read(spec("FP32", -1, 2), NPY, body).tolist()
    assert (1, 2, 2) == read(spec("FP32", -1, 2, 2), NPY, body).shape


@pytest.mark.parametrize("media_type", ["image/jpeg", "image/png", "image/webp"])
@pytest.mark.parametrize(
    ("taken", "shape"), [(spec("FP32", -1, 8, 8, 3), (1,)), (spec("BYTES", -1, 1), (1, 1))]
)
def test_an_image_is_one_element_of_bytes(
    media_type: str, taken: TensorSpec, shape: tuple[int, ...]
) -> None:
    """The core decodes it, or reports that the model takes no images."""
    tensor = read(taken, media_type, b"\xff\xd8\xff")

    assert (shape, [b"\xff\xd8\xff"]) == (tensor.shape, list(tensor.flat))


REFUSED: Sequence[tuple[str, str, str, str]] = (
    (
        "FP32",
        JSON,
        "[[1, 2], [3]]",
        "of equal length on each level, got lists of different lengths",
    ),
    ("FP32", JSON, "[[1, 2], 3]", "of equal length on each level, got lists of different lengths"),
    ("FP32", JSON, "[1, [2]]", "expected elements of FP32, got list"),
    (
        "FP32",
        JSON,
        "[" * 65 + "]" * 65,
        "lists of equal length on each level",
    ),
    ("FP32", JSON, '[["1", "2"]]', "expected elements of FP32, got str"),
    ("FP32", JSON, '[[{"b64": "AA=="}]]', "expected elements of FP32, got dict"),
    ("FP32", JSON, "[[1e39, 1]]", "a number out of range"),
    ("FP32", JSON, "[[true, 1]]", "expected elements of FP32, got bool"),
    ("FP32", JSON, "null", "expected elements of FP32, got NoneType"),
    ("FP32", JSON, "[[NaN, 1]]", "expected a list in JSON, or one as 'instances'"),
    ("FP32", JSON, "[[1, 2]", "expected a list in JSON, or one as 'instances'"),
    ("FP32", JSON, '{"data": 1}', "expected a list in JSON, or one as 'instances'"),
    ("FP32", JSON, "[" * 10_000, "nested too deeply"),
    ("FP32", JSON, "[" * 100_000, "expected at most 20000 arrays in the JSON, got 100000"),
    ("INT8", JSON, "[[1, 128]]", "expected INT8 between -128 and 127, got 128"),
    ("INT8", JSON, "[[1, 1.5]]", "expected elements of INT8, got float"),
    ("FP32", CSV, "1,2\n3", "rows of FP32 in CSV, got the number of columns changed from 2 to 1"),
    ("FP32", CSV, "a,b\n1,2", "could not convert string 'a' to float64 at row 0, column 1"),
    ("FP32", CSV, "1,", "could not convert string ''"),
    ("FP32", CSV, "1_0,2", "could not convert string '1_0'"),
    ("FP32", CSV, "1;2", "could not convert string '1;2'"),
    ("FP32", CSV, " \n\n ", "expected rows of CSV, got blank lines"),
    ("INT8", CSV, "1,128", "expected INT8 between -128 and 127, got 128"),
    ("INT8", CSV, "1,1.5", "could not convert string '1.5'"),
    ("UINT8", CSV, "1,-1", "could not convert string '-1'"),
    ("INT64", CSV, f"1,{'9' * 30}", "could not convert string '9"),
    ("BOOL", CSV, "true,maybe", "expected rows of BOOL in CSV, got 'maybe'"),
    ("BYTES", CSV, 'a,"b', "expected rows of BYTES in CSV, got unexpected end of data"),
    ("BYTES", CSV, "a,b\nc", "rows of different lengths"),
    ("FP32", NPY, "1,2", "the body is not a .npy file of version 1, 2 or 3"),
    ("FP32", JSON, "", "expected a body of application/json, got an empty one"),
)


@pytest.mark.parametrize(("datatype", "media_type", "body", "text"), REFUSED)
def test_what_is_no_tensor_of_the_model_is_refused(
    datatype: str, media_type: str, body: str, text: str
) -> None:
    with pytest.raises((InvalidBody, InvalidTensor), match=text):
        read(spec(datatype, -1, 2), media_type, body)


@pytest.mark.parametrize("media_type", [JSON, CSV])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_text_is_utf_8(media_type: str, datatype: str) -> None:
    with pytest.raises((InvalidBody, InvalidTensor)):
        read(spec(datatype, -1, 1), media_type, b'["\xff"]')


@pytest.mark.parametrize("body", [b"\xef", b"\xef\xbb", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
@pytest.mark.parametrize("datatype", ["UINT8", "BYTES"])
def test_a_byte_order_mark_is_no_row(datatype: str, body: bytes) -> None:
    """Nor is a partial one, which Python's own decoder ignores."""
    with pytest.raises((InvalidBody, InvalidTensor)):
        read(spec(datatype, -1, 2), CSV, body)


@pytest.mark.parametrize("media_type", ["text/html", "application/x-recordio-protobuf", "images/x"])
def test_other_media_types_are_not_read(media_type: str) -> None:
    text = r"expected a Content-Type of application/json, text/csv, application/x-npy, image/\*"
    with pytest.raises(UnsupportedMediaType, match=text):
        read(spec("FP32", -1, 2), media_type, "1,2")


def test_a_bare_tensor_is_for_models_with_one_input() -> None:
    two = info(spec("FP32", -1), spec("FP32", -1, name="z"))
    with pytest.raises(InvalidRequest, match="is for models with one input, it has 2: send a V2"):
        read_plain_request(two, "m", JSON, memoryview(b"[1]"))


@given(st.sampled_from([JSON, CSV, NPY]), st.sampled_from(list(DATATYPES)), st.binary())
def test_whatever_the_bytes_are(media_type: str, datatype: str, body: bytes) -> None:
    """Reading returns a tensor or raises InvalidRequest."""
    with suppress(InvalidRequest):
        read_plain_request(info(spec(datatype, -1, 2)), "m", media_type, memoryview(body))


@given(
    st.sampled_from([JSON, CSV]),
    st.sampled_from(list(DATATYPES)),
    st.text(alphabet='[]{}",.-+eE0123456789 \n\r\tnaifNI:"instances'),
)
def test_whatever_the_text_is(media_type: str, datatype: str, body: str) -> None:
    """Reading returns a tensor or raises InvalidRequest."""
    with suppress(InvalidRequest):
        read_plain_request(info(spec(datatype, -1, 2)), "m", media_type, memoryview(body.encode()))


# --- answers -----------------------------------------------------------------------------------


def respond(
    media_type: str, *arrays: Any, batch: int = 8, rules: JsonRules = DEFAULT_RULES
) -> HttpResponse:
    tensors = [np.asarray(array) for array in arrays]
    outputs = []
    for name, tensor in zip("yz", tensors, strict=False):
        datatype = datatype_of(tensor.dtype)
        assert datatype is not None
        outputs.append(InferOutput(name, datatype, tensor))
    specs = [TensorSpec(o.name, o.datatype, o.data.shape) for o in outputs]
    response = InferResponse("m", "1", "", tuple(outputs))
    model = info(outputs=specs, batch=batch)
    return write_plain_response(model, response, media_type, rules)


def body_of(response: HttpResponse) -> bytes:
    return b"".join(response.parts)


def texts(*elements: Any) -> Tensor:
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


@pytest.mark.parametrize(
    ("outputs", "batch", "expected"),
    [
        ([np.array([[1, 2.5]], np.float32)], 8, [[1, 2.5]]),
        ([np.array([[1, 2.5]], np.float16)], 8, [[1, 2.5]]),
        ([np.array([[1, 2.5]], ml_dtypes.bfloat16)], 8, [[1, 2.5]]),
        ([np.array([2**64 - 1], np.uint64)], 8, [2**64 - 1]),
        ([np.array([True, False])], 8, [True, False]),
        ([texts(b"a", "\u00e9".encode())], 8, ["a", "é"]),
        ([np.float32(7)], 0, 7),
        (
            [np.array([[1, 2], [3, 4]], np.int8), np.array([5, 6], np.int8)],
            8,
            [{"y": [1, 2], "z": 5}, {"y": [3, 4], "z": 6}],
        ),
        ([np.array([1, 2, 3], np.int8), np.int8(7)], 0, {"y": [1, 2, 3], "z": 7}),
    ],
)
def test_predictions_in_json(outputs: list[Any], batch: int, expected: Any) -> None:
    """As TensorFlow Serving answers; without batches all outputs are in one object."""
    response = respond(JSON, *outputs, batch=batch)

    assert JSON == response.content_type
    assert {"predictions": expected} == json.loads(body_of(response))


@pytest.mark.parametrize(
    "output",
    [
        np.array([np.nan], np.float32),
        np.array([np.inf], np.float16),
        np.array([-np.inf], ml_dtypes.bfloat16),
    ],
)
@pytest.mark.parametrize("media_type", [JSON, LINES])
def test_what_json_cannot_hold_is_for_python_or_refused(output: Tensor, media_type: str) -> None:
    text = body_of(respond(media_type, output)).decode()
    predictions = json.loads(text)
    element = predictions["predictions"][0] if media_type == JSON else predictions

    assert str(float(output[0])) == str(element)
    text = (
        r"^model 'm', output 'y': JSON \(strict_json\) cannot hold .*, ask for application/x-npy$"
    )
    with pytest.raises(OutputNotInForm, match=text):
        respond(media_type, output, rules=JsonRules(strict=True))


@pytest.mark.parametrize("element", [b"\xff", "\ud800"])
@pytest.mark.parametrize("media_type", [JSON, LINES])
def test_bytes_that_are_not_utf_8_are_refused_or_surrogates(
    media_type: str, element: bytes | str
) -> None:
    """Also next to numbers that are not finite."""
    outputs = [texts("a", element), np.array([0.5, np.nan])]
    for rules in (JsonRules(), JsonRules(strict=True)):
        with pytest.raises(OutputNotText, match="model 'm', output 'y': expected UTF-8"):
            respond(media_type, *outputs[: 1 if rules.strict else 2], rules=rules)
    text = body_of(respond(media_type, *outputs, rules=JsonRules(surrogates=True))).decode()
    last = json.loads(text.splitlines()[-1])
    row = last["predictions"][-1] if media_type == JSON else last

    read = row["y"]
    assert element == (read if isinstance(element, str) else read.encode(errors="surrogateescape"))
    assert np.isnan(row["z"])


def test_lines_of_json_are_rows() -> None:
    one = respond(LINES, np.array([[1, 2], [3, 4]], np.int32))
    two = respond(LINES, np.array([[1], [2]], np.int32), np.array([0.5, 1.5]))

    assert b"[1,2]\n[3,4]\n" == body_of(one)
    assert b'{"y":[1],"z":0.5}\n{"y":[2],"z":1.5}\n' == body_of(two)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (np.array([[0.1, 2], [np.nan, np.inf]], np.float32), "0.1,2.0\nnan,inf\n"),
        (np.array([[0.1, 2]], ml_dtypes.bfloat16), "0.100098,2\n"),
        (np.array([[0.1]], np.float64), "0.1\n"),
        (np.array([1, -2], np.int64), "1\n-2\n"),
        (np.int64(7), "7\n"),
        (np.array([[True, False]]), "True,False\n"),
        (texts(b'a,"b"', b""), '"a,""b"""\n""\n'),
    ],
)
def test_tables_in_csv(output: Any, expected: str) -> None:
    response = respond(CSV, output)

    assert (CSV, expected) == (response.content_type, body_of(response).decode())


@given(arrays.arrays(np.float32, (2, 3), elements=st.floats(width=32)))
def test_csv_is_read_back(array: Tensor) -> None:
    """Exactly: numbers are written with as many digits as needed."""
    body = body_of(respond(CSV, array))

    np.testing.assert_array_equal(array, read(spec("FP32", -1, 3), CSV, body))


def test_an_array_in_a_file_of_numpy() -> None:
    response = respond(NPY, np.array([[1, 2]], np.float32))

    assert NPY == response.content_type
    assert [[1, 2]] == read(spec("FP32", -1, 2), NPY, body_of(response)).tolist()


# # --- choice of the format ----------------------------------------------------------------------


ONE = [spec("FP32", -1, 2)]
DEEP = [spec("FP32", -1, 2, 2)]
TEXT = [spec("BYTES", -1)]
TWO = [spec("FP32", -1), spec("FP32", -1, name="z")]


@pytest.mark.parametrize(
    ("outputs", "accept", "default", "expected"),
    [
        (ONE, "", JSON, JSON),
        (ONE, "*/*", JSON, JSON),
        (ONE, "", CSV, CSV),
        (ONE, "*/*", NPY, NPY),
        (DEEP, "*/*", CSV, JSON),
        (ONE, "", "text/html", JSON),
        (ONE, JSON, CSV, JSON),
        (ONE, CSV, JSON, CSV),
        (ONE, "text/html, application/x-npy;q=0.1", JSON, NPY),
        (ONE, "application/octet-stream", JSON, "application/octet-stream"),
        (DEEP, NPY, JSON, NPY),
        (DEEP, f"{CSV}, {JSON};q=0.5", JSON, JSON),
        (TEXT, CSV, JSON, CSV),
        (TWO, "*/*", CSV, JSON),
    ],
)
def test_the_client_chooses_and_the_default_what_it_leaves_open(
    outputs: list[TensorSpec], accept: str, default: str, expected: str
) -> None:
    others = ["application/octet-stream"]

    assert expected == choose_form(outputs, accept, default=default, others=others)


@pytest.mark.parametrize(
    ("outputs", "accept"),
    [(ONE, "text/html"), (DEEP, CSV), (TWO, CSV), (TWO, NPY), (TEXT, NPY), (ONE, f"{JSON};q=0")],
)
def test_a_form_that_cannot_hold_the_outputs_is_not_acceptable(
    outputs: list[TensorSpec], accept: str
) -> None:
    with pytest.raises(NotAcceptable, match="expected an Accept of application/json"):
        choose_form(outputs, accept, default=JSON)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("datatype", ["FP32", "INT64"])
def test_long_lines_of_numbers_are_read_in_pieces(
    monkeypatch: pytest.MonkeyPatch, rows: int, datatype: str
) -> None:
    """Parsing a whole long line in one call would block the event loop."""
    data = np.arange(rows * 40_000, dtype=DATATYPES[datatype].dtype).reshape(rows, 2, 20_000)
    lines = b"\n\n".join(json.dumps(row.tolist()).encode() for row in data)
    monkeypatch.setattr(plain_tensors, "_VALUE", None)

    np.testing.assert_array_equal(read(spec(datatype, -1, 2, 20_000), LINES, lines), data)


@pytest.mark.parametrize("last", [b"1", b"[1]", b"[2,true]"])
def test_long_lines_beside_others_are_read_as_before(last: bytes) -> None:
    """Unusual input goes to the general reader, even after pieces have been read."""
    lines = b"[" + b",".join([b"1"] * 40_000) + b"]\n" + last

    with pytest.raises(InvalidTensor, match="lists of equal length on each level"):
        read(spec("FP32", -1, -1), LINES, lines)
