import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from xlaserve.errors import InvalidTensor, OutputNotInForm
from xlaserve.grpc.infer.tensors import read_inputs
from xlaserve.http.json.json_tensors import JsonRules
from xlaserve.http.v2 import infer_response
from xlaserve.http.v2.infer_request import read_infer_request
from xlaserve.http.v2.infer_response import InferBody, write_infer_response
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.inference import InferOutput, InferRequest, InferResponse, RequestedOutput
from xlaserve.tensors import BYTES, DATATYPES, Datatype, Tensor, TensorSpec, to_bytes
from xlaserve_proto import inference as pb

FP32 = DATATYPES["FP32"]
Y = InferOutput("y", FP32, np.array([[1.5, -0.0]], np.float32))
Z = InferOutput("z", BYTES, np.array(["é".encode(), b'"'], dtype=object))
N = InferOutput("n", DATATYPES["INT64"], np.array([[2**63 - 1], [-(2**63)]]))


def write(
    *outputs: InferOutput,
    default: bool | None = None,
    wanted: dict[str, bool | None] | None = None,
    id: str = "",
) -> InferBody:
    """Write outputs for a request with these `binary_data_output` and `binary_data` parameters."""
    request = InferRequest(
        "m",
        outputs=tuple(
            RequestedOutput(name, {} if binary is None else {"binary_data": binary})
            for name, binary in (wanted or {}).items()
        ),
        parameters={} if default is None else {"binary_data_output": default},
    )
    return write_infer_response(request, InferResponse("m", "3", id, outputs))


def taken_apart(body: InferBody) -> tuple[Any, bytes]:
    """Return the JSON, and the binary data after it."""
    whole = b"".join(body.parts)
    length = len(whole) if body.header_length is None else body.header_length
    return json.loads(whole[:length]), whole[length:]


def described(output: InferOutput, **more: object) -> dict[str, object]:
    shape = list(output.data.shape)
    return {"name": output.name, "datatype": output.datatype.name, "shape": shape, **more}


# --- the form ----------------------------------------------------------------------------------


def test_outputs_are_json_unless_the_request_says_otherwise() -> None:
    body = write(Y, Z, N, id="42")

    assert body.header_length is None
    assert {
        "model_name": "m",
        "model_version": "3",
        "id": "42",
        "outputs": [
            described(Y, data=[1.5, -0.0]),
            described(Z, data=["é", '"']),
            described(N, data=[2**63 - 1, -(2**63)]),
        ],
    } == taken_apart(body)[0]
    assert b"-0.0" in b"".join(body.parts)


def test_a_request_without_an_id_gets_none() -> None:
    assert {"model_name": "m", "model_version": "3", "outputs": []} == taken_apart(write())[0]


@pytest.mark.parametrize(
    ("default", "own", "binary"),
    [
        (None, None, False),
        (None, False, False),
        (None, True, True),
        (False, None, False),
        (False, True, True),
        (True, None, True),
        (True, False, False),
        (True, True, True),
    ],
)
def test_the_output_decides_its_form_before_the_request(
    default: bool | None, own: bool | None, binary: bool
) -> None:
    """Binary tensor data extension, inference request."""
    text, tail = taken_apart(write(Y, default=default, wanted={"y": own}))

    form = {"parameters": {"binary_data_size": 8}} if binary else {"data": [1.5, -0.0]}
    assert [described(Y, **form)] == text["outputs"]
    assert (Y.data.tobytes() if binary else b"") == tail


def test_outputs_that_were_not_asked_for_by_name_follow_the_request() -> None:
    text, tail = taken_apart(write(Y, N, default=True))

    assert [8, 16] == [output["parameters"]["binary_data_size"] for output in text["outputs"]]
    assert Y.data.tobytes() + N.data.tobytes() == tail


def test_forms_are_mixed_in_the_order_of_the_outputs() -> None:
    body = write(Y, Z, N, wanted={"y": True, "z": False, "n": True})
    text, tail = taken_apart(body)

    assert ["y", "z", "n"] == [output["name"] for output in text["outputs"]]
    assert [False, True, False] == ["data" in output for output in text["outputs"]]
    assert Y.data.tobytes() + N.data.tobytes() == tail
    assert body.header_length is not None


def test_binary_tensors_are_views_of_their_arrays() -> None:
    """They are neither copied nor joined with other data."""
    body = write(Y, N, default=True)

    views = [np.frombuffer(part, np.uint8) for part in body.parts[-2:]]
    assert [True, True] == [
        np.shares_memory(view, output.data) for view, output in zip(views, (Y, N), strict=True)
    ]


def test_large_json_is_in_pieces_and_its_length_is_that_of_all() -> None:
    large = InferOutput("y", FP32, np.arange(100_000, dtype=np.float32))

    body = write(large, N, wanted={"y": False, "n": True})
    text, tail = taken_apart(body)

    assert len(body.parts) > 3
    assert large.data.tolist() == text["outputs"][0]["data"]
    assert N.data.tobytes() == tail


@pytest.mark.parametrize("data", [np.zeros((0, 2), np.float32), np.zeros((2, 0), np.float32)])
@pytest.mark.parametrize("binary", [True, False])
def test_outputs_without_elements_have_either_form(data: Tensor, binary: bool) -> None:
    output = InferOutput("y", FP32, data)

    text, tail = taken_apart(write(output, default=binary))

    form: dict[str, object] = {"parameters": {"binary_data_size": 0}} if binary else {"data": []}
    assert [described(output, **form)] == text["outputs"]
    assert b"" == tail


@pytest.mark.parametrize(
    ("datatype", "data", "what"),
    [
        ("FP32", np.array([1, np.nan], np.float32), "NaN or Infinity"),
        ("FP64", np.array([-np.inf]), "NaN or Infinity"),
    ],
)
def test_what_strict_json_cannot_hold_is_not_the_fault_of_who_asked(
    datatype: str, data: Tensor, what: str
) -> None:
    response = InferResponse("m", "3", "", (InferOutput("y", DATATYPES[datatype], data),))

    text = rf"^model 'm', output 'y': JSON \(strict_json\) cannot hold {what}, ask for binary_data$"
    with pytest.raises(OutputNotInForm, match=text):
        write_infer_response(InferRequest("m"), response, JsonRules(strict=True))


@pytest.mark.parametrize(
    ("datatype", "data", "what"),
    [
        ("FP16", np.array([1], np.float16), "FP16"),
        ("BF16", np.array([1], ml_dtypes.bfloat16), "BF16"),
    ],
)
def test_what_json_cannot_carry_names_the_output_and_the_way(
    datatype: str, data: Tensor, what: str
) -> None:
    output = InferOutput("y", DATATYPES[datatype], data)

    with pytest.raises(InvalidTensor) as caught:
        write(Y, output)

    message = (
        f"model 'm', output 'y': expected a request for binary_data, the only encoding of {what}"
    )
    assert str(caught.value).startswith(message)
    assert to_bytes(output.datatype, data) == taken_apart(write(output, default=True))[1]


# # --- round trips -------------------------------------------------------------------------------


def elements_of(datatype: Datatype, *, text: bool) -> st.SearchStrategy[Any]:
    if datatype is BYTES:
        return st.text(max_size=4).map(str.encode) if text else st.binary(max_size=4)
    if datatype.name == "BF16":
        return st.integers(-128, 128).map(ml_dtypes.bfloat16)
    if text and datatype.dtype.kind == "f":
        return npst.from_dtype(datatype.dtype, allow_nan=False, allow_infinity=False)
    return npst.from_dtype(datatype.dtype)


@st.composite
def outputs(draw: st.DrawFn) -> tuple[InferOutput, bool]:
    """Draw a tensor of any datatype and shape, and whether to send it as binary."""
    datatype = draw(st.sampled_from(list(DATATYPES.values())))
    binary = datatype.contents is None or draw(st.booleans())
    shape = draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    elements = elements_of(datatype, text=not binary)
    data = draw(npst.arrays(datatype.dtype, shape, elements=elements))
    return InferOutput(draw(st.text(max_size=3)), datatype, data), binary


def as_request(body: InferBody) -> tuple[memoryview, int | None]:
    """Turn a response into a request: its outputs become the inputs."""
    text, tail = taken_apart(body)
    head = json.dumps({"inputs": text["outputs"], "id": text.get("id")}).encode()
    return memoryview(head + tail), None if body.header_length is None else len(head)


@given(st.lists(outputs(), max_size=4, unique_by=lambda case: case[0].name), st.text(max_size=3))
def test_what_is_written_is_read_as_it_was_and_as_over_grpc(
    cases: list[tuple[InferOutput, bool]], id: str
) -> None:
    """Every datatype and shape, JSON and binary in one body, exact to the bit."""
    written = [output for output, _ in cases]
    specs = tuple(TensorSpec(o.name, o.datatype, o.data.shape) for o in written)
    body = write(*written, wanted={o.name: binary for o, binary in cases}, id=id)

    whole, length = as_request(body)
    request = read_infer_request(
        ModelInfo("test", specs, (), 0), "m", "", whole, length, max_depth=100
    )

    assert id == request.id
    assert [o.name for o in written] == [tensor.name for tensor in request.inputs]
    for output, over_http, over_grpc in zip(
        written, request.inputs, read_inputs(as_message(written)), strict=True
    ):
        for read in (over_http, over_grpc):
            assert output.datatype is read.datatype
            assert output.data.shape == read.data.shape
            assert to_bytes(output.datatype, output.data) == to_bytes(read.datatype, read.data)


def as_message(tensors: list[InferOutput]) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(
        inputs=[
            pb.ModelInferRequestInferInputTensor(
                name=o.name, datatype=o.datatype.name, shape=list(o.data.shape)
            )
            for o in tensors
        ],
        raw_input_contents=[bytes(to_bytes(o.datatype, o.data)) for o in tensors],
    )


FAULTS: list[tuple[str, list[int], Any, str]] = [
    ("INT8", [1], [128], "int_contents"),
    ("INT8", [2], [1], "int_contents"),
    ("FP32", [2, 2], [1.0, 2.0, 3.0], "fp32_contents"),
    ("FP64", [-1], [1.0], "fp64_contents"),
    ("BOOL", [3], [True], "bool_contents"),
    ("INT32", [1] * 65, [1], "int_contents"),
]


@pytest.mark.parametrize(("datatype", "shape", "data", "field"), FAULTS)
def test_the_same_fault_has_the_same_text_as_over_grpc(
    datatype: str, shape: list[int], data: list[Any], field: str
) -> None:
    tensor: dict[str, Any] = {"name": "x", "datatype": datatype, "shape": shape}
    message = pb.ModelInferRequest(
        model_name="m",
        inputs=[
            pb.ModelInferRequestInferInputTensor(
                **tensor, contents=pb.InferTensorContents(**{field: data})
            )
        ],
    )
    info = ModelInfo("test", (TensorSpec("x", FP32, (1,)),), (), 0)
    body = memoryview(json.dumps({"inputs": [tensor | {"data": data}]}).encode())

    with pytest.raises(InvalidTensor) as over_grpc:
        read_inputs(message)
    with pytest.raises(InvalidTensor) as over_http:
        read_infer_request(info, "m", "", body, None, max_depth=100)

    assert str(over_grpc.value) == str(over_http.value)


def of(name: str, values: object) -> InferOutput:
    return InferOutput("y", DATATYPES[name], np.array(values, DATATYPES[name].dtype))


NUMBERS = {
    "floats": (Y,),
    "64 bits": (N,),
    "large": (of("UINT64", [2**64 - 1]),),
    "small": (of("FP64", [[5e-324, 1.7976931348623157e308]]),),
    "booleans": (of("BOOL", [[True], [False]]),),
    "two": (Y, N),
    "none": (),
    "text": (Z,),
    "text and numbers": (Y, Z),
    "a scalar": (of("INT8", -1),),
    "no elements": (of("FP32", np.zeros((0, 3))),),
    "not dense": (InferOutput("y", FP32, np.arange(12, dtype=np.float32).reshape(3, 4).T),),
    "NaN": (of("FP32", [1, np.nan]),),
    "infinite": (of("FP64", [-np.inf]),),
    "many": (of("FP32", np.arange(1025)),),
    "called null": (InferOutput("null", FP32, np.zeros(1, np.float32)),),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("id", ["", 'i"d'])
def test_a_short_response_has_the_bytes_of_any_other(
    name: str, id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = b"".join(write(*NUMBERS[name], id=id).parts)
    monkeypatch.setattr(infer_response, "_SHORT_NAMES", ())
    whole = b"".join(write(*NUMBERS[name], id=id).parts)

    assert whole == short


def test_an_ordinary_short_response_is_written_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would compare the general path with itself."""
    monkeypatch.setattr(infer_response, "write_elements", None)

    assert [1.5, -0.0] == taken_apart(write(Y))[0]["outputs"][0]["data"]
