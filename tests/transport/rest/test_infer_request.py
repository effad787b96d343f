import json
import struct
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mutation import mutate

from xlaserve.errors import (
    DuplicateTensor,
    InvalidBody,
    InvalidParameter,
    InvalidRequest,
    InvalidTensor,
    UnknownDatatype,
    UnknownTensor,
    XlaserveError,
)
from xlaserve.http.v2 import infer_request
from xlaserve.http.v2.infer_request import read_header_length, read_infer_request
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.checks import check_inputs, check_outputs
from xlaserve.serving.inference import InferRequest, SharedInput
from xlaserve.tensors import BYTES, DATATYPES, TensorSpec

FP32 = DATATYPES["FP32"]
INFO = ModelInfo(
    "test",
    (
        TensorSpec("x", FP32, (-1, 2)),
        TensorSpec("n", DATATYPES["INT32"], (-1, 2)),
        TensorSpec("t", BYTES, (-1,)),
    ),
    (TensorSpec("y", FP32, (-1, 2)), TensorSpec("z", BYTES, (-1,))),
    max_batch_size=8,
)
X = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, -2]}


def read(body: object, tail: bytes | None = None, *, depth: int = 100) -> InferRequest:
    """Read a body, as JSON or text; with a tail, as a binary request."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = None if tail is None else len(text)
    whole = memoryview(text + (tail or b""))
    return read_infer_request(INFO, "m", "3", whole, length, max_depth=depth)


def refusal(kind: type[Exception], body: object, tail: bytes | None = None) -> str:
    with pytest.raises(kind) as caught:
        read(body, tail)
    return str(caught.value)


def binary(name: str, datatype: str, shape: list[int], size: object = None) -> dict[str, object]:
    """Describe an input whose data follows the JSON."""
    tensor: dict[str, object] = {"name": name, "datatype": datatype, "shape": shape}
    return tensor if size is None else tensor | {"parameters": {"binary_data_size": size}}


def packed(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


# --- JSON --------------------------------------------------------------------------------------


def test_a_whole_request_is_read() -> None:
    """Model and version come from the path; those in the body are ignored."""
    request = read(
        {
            "id": "42",
            "model_name": "other",
            "parameters": {"sequence_id": 7, "priority": 0.5, "flag": True, "text": "é"},
            "inputs": [X | {"parameters": {"a": "b"}, "unknown": {"nested": [1]}}],
            "outputs": [{"name": "y", "parameters": {"binary_data": True}}, {"name": "z"}],
            "more": None,
        }
    )

    assert ("m", "3", "42") == (request.model_name, request.model_version, request.id)
    assert {"sequence_id": 7, "priority": 0.5, "flag": True, "text": "é"} == request.parameters
    (tensor,) = request.inputs
    assert ("x", FP32, {"a": "b"}) == (tensor.name, tensor.datatype, tensor.parameters)
    assert [[1.5, -2.0]] == tensor.data.tolist()
    assert [("y", {"binary_data": True}), ("z", {})] == [
        (output.name, output.parameters) for output in request.outputs
    ]


@pytest.mark.parametrize("null", [{}, {"id": None, "parameters": None, "outputs": None}])
def test_what_is_left_out_is_empty(null: dict[str, None]) -> None:
    """Clients that write every field write null for the unused ones."""
    request = read({"inputs": [X | ({"parameters": None} if null else {})]} | null)

    assert ("", {}, ()) == (request.id, request.parameters, request.outputs)
    assert {} == request.inputs[0].parameters


def test_of_equal_keys_the_last_counts() -> None:
    text = b'{"id":"a","inputs":[],"inputs":[{"name":"w","name":"x","shape":[9],"shape":[1],'
    request = read(text + b'"datatype":"INT8","data":[0],"data":[1],"datatype":"FP32"}],"id":"b"}')

    assert "b" == request.id
    assert ["x"] == [tensor.name for tensor in request.inputs]
    assert [1.0] == request.inputs[0].data.tolist()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (b"", "an empty body"),
        (b" ", "truncated"),
        (b"{", "truncated"),
        (b"null", "Expected `object`, got `null`"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `inputs`"),
        (b'{"inputs":null}', "`$.inputs`"),
        (b'{"inputs":[{}]}', "missing required field `name` - at `$.inputs[0]`"),
        (b'{"inputs":[{"name":"x","shape":[1],"data":[1]}]}', "missing required field `datatype`"),
        (b'{"inputs":[{"name":1}]}', "`$.inputs[0].name`"),
        (b'{"inputs":[{"name":"x","shape":[1.5]}]}', "`$.inputs[0].shape[0]`"),
        (b'{"inputs":[{"name":"x","shape":[true]}]}', "`$.inputs[0].shape[0]`"),
        (b'{"inputs":[{"name":"x","shape":[9223372036854775808]}]}', "`$.inputs[0].shape[0]`"),
        (b'{"inputs":[{"name":"x","shape":[' + b"9" * 10_000 + b"]}]}", "`$.inputs[0].shape[0]`"),
        (b'{"inputs":[],"id":7}', "`$.id`"),
        (b'{"inputs":[],"parameters":[]}', "`$.parameters`"),
        (b'{"inputs":[],"parameters":{"a":1e400}}', "out of range"),
        (b'{"inputs":[],"parameters":{"a":' + b"9" * 10_000 + b"}}", "out of range"),
        (b'{"inputs":[],"outputs":[{}]}', "missing required field `name` - at `$.outputs[0]`"),
        (b'{"inputs":[]} {}', "trailing characters"),
        (b'{"inputs":[],}', "malformed"),
        (b'{"inputs":[],"id":"\xff"}', "utf-8"),
        (b'{"inputs":[],"id":"\\ud800"}', "JSON"),
        (b'{"inputs":[],"id":"\xed\xa0\x80"}', "utf-8"),
        (b"\xef\xbb\xbf{}", "malformed"),
        (b'{"inputs":[],"parameters":{"a":NaN}}', "invalid character (byte 31)"),
        (b'{"inputs":[],"id":Infinity}', "invalid character (byte 18)"),
    ],
)
def test_a_body_that_is_no_request_is_refused_with_the_place(text: bytes, place: str) -> None:
    assert place in refusal(InvalidBody, text)


def test_the_fault_of_a_tensor_names_model_and_tensor() -> None:
    tensor = X | {"data": [1, 2, 3]}

    message = "model 'm', input 'x': expected 2 elements for FP32[1,2], got 3 elements"
    assert message == refusal(InvalidTensor, {"inputs": [tensor]})


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("data", ["[%s,1]", "[[1,%s]]", "[%s,NaN]"])
def test_a_number_that_is_not_finite_names_its_tensor(token: str, data: str) -> None:
    """The error says what to send instead; python's json writes such tokens, which are not JSON."""
    body = {"inputs": [X, X | {"name": "NaN", "data": "HERE"}, X], "id": "NaN"}
    text = json.dumps(body).replace('"HERE"', data % token).encode()

    message = refusal(InvalidTensor, text)

    assert message.startswith("model 'm', input 'NaN': expected finite elements of FP32 in JSON")
    assert "binary data (binary_data_size)" in message
    assert message.endswith(f"got {token}")


def test_texts_of_such_names_are_texts_and_no_numbers() -> None:
    tensor = {"name": "t", "datatype": "BYTES", "shape": [2], "data": ["NaN", "-Infinity"]}

    assert [b"NaN", b"-Infinity"] == read({"inputs": [tensor]}).inputs[0].data.tolist()
    text = json.dumps({"inputs": [tensor]}).replace('"NaN"', "NaN").encode()
    assert "malformed" in refusal(InvalidBody, text)


def test_data_is_required() -> None:
    tensor = binary("x", "FP32", [1, 2])

    message = refusal(InvalidTensor, {"inputs": [tensor]})

    assert "expected data, or binary data and an Inference-Header-Content-Length" in message
    assert "got no list" in refusal(InvalidTensor, {"inputs": [tensor | {"data": None}]})


def test_unknown_datatypes_are_refused() -> None:
    assert "'FLOAT'" in refusal(UnknownDatatype, {"inputs": [X | {"datatype": "FLOAT"}]})


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (None, "null"),
        ([1], "an array"),
        ({}, "an object"),
        (2**64, "a larger integer"),
        (-(2**63) - 1, "a larger integer"),
        (10**300, "a larger integer"),
    ],
)
@pytest.mark.parametrize("place", ["request", "input", "output"])
def test_parameters_are_plain_values(value: object, got: str, place: str) -> None:
    parameters = {"parameters": {"fine": 1, "odd": value}}
    body = {
        "request": {"inputs": [X]} | parameters,
        "input": {"inputs": [X | parameters]},
        "output": {"inputs": [X], "outputs": [{"name": "y"} | parameters]},
    }

    message = refusal(InvalidParameter, body[place])

    assert message.startswith("parameter 'odd': expected a")
    assert message.endswith(f"got {got}")


def test_parameters_of_the_extension_are_truth_values() -> None:
    body = {"inputs": [X], "parameters": {"binary_data_output": 1}}
    output = {"name": "y", "parameters": {"binary_data": "yes"}}

    assert "expected true or false, got 1" in refusal(InvalidParameter, body)
    message = refusal(InvalidTensor, {"inputs": [X], "outputs": [output]})
    assert "output 'y': expected binary_data to be true or false, got 'yes'" in message


# --- depth -------------------------------------------------------------------------------------


def test_bodies_may_be_as_deep_as_the_limit() -> None:
    tensor = X | {"shape": [1], "data": [[[[5]]]]}

    assert [5.0] == read({"inputs": [tensor]}, depth=7).inputs[0].data.tolist()
    with pytest.raises(InvalidBody, match="more than 6 levels deep"):
        read({"inputs": [tensor]}, depth=6)


@pytest.mark.parametrize("limit", [100, 10**9])
@pytest.mark.parametrize("depth", [10_000, 1_000_000])
@pytest.mark.parametrize("place", [b'{"inputs":[{"data":', b'{"inputs":[{"a":', b'{"a":', b""])
@pytest.mark.parametrize("close", [b"]", b""])
def test_bodies_that_are_far_too_deep_are_refused(
    place: bytes, depth: int, limit: int, close: bytes
) -> None:
    """Even if the limit is far above what the parser can handle."""
    with pytest.raises(InvalidBody):
        read(place + b"[" * depth + close * depth, depth=limit)


# --- the header --------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "length"), [(None, None), ("0", 0), ("17", 17), ("007", 7)])
def test_the_length_of_the_json_is_read(text: str | None, length: int | None) -> None:
    assert length == read_header_length(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " 1",
        "1 ",
        "-1",
        "+1",
        "1.0",
        "1e3",
        "0x10",
        "1_0",
        "\u0661",
        "1,2",
        "9" * 19,
        "9" * 9999,
    ],
)
def test_the_length_of_the_json_is_decimal_digits(text: str) -> None:
    with pytest.raises(InvalidBody, match="expected Inference-Header-Content-Length in digits"):
        read_header_length(text)


@pytest.mark.parametrize("length", [-1, 10**17, 1000])
def test_the_json_is_within_the_body(length: int) -> None:
    text = json.dumps({"inputs": [X]}).encode()

    with pytest.raises(InvalidBody, match=f"expected JSON of {length} bytes"):
        read_infer_request(INFO, "m", "", memoryview(text), length, max_depth=100)


@pytest.mark.parametrize(("change", "fault"), [(-1, "truncated"), (1, "trailing characters")])
def test_the_json_is_as_long_as_promised(change: int, fault: str) -> None:
    text = json.dumps({"inputs": [binary("x", "FP32", [1, 2], 8)]}).encode()
    body = memoryview(text + b"." * 8)

    with pytest.raises(InvalidBody, match=fault):
        read_infer_request(INFO, "m", "", body, len(text) + change, max_depth=100)


# --- binary tensors ----------------------------------------------------------------------------


def test_binary_and_json_inputs_are_mixed_in_any_order() -> None:
    """Binary data follows in the order of the descriptions."""
    inputs = [
        binary("n", "INT32", [1, 2], 8),
        X,
        binary("t", "BYTES", [2], 11) | {"parameters": {"binary_data_size": 11, "a": 1}},
    ]
    tail = np.array([7, -8], "<i4").tobytes() + packed(b"abc", b"")

    request = read({"inputs": inputs}, tail)

    assert [[7, -8]] == request.inputs[0].data.tolist()
    assert [[1.5, -2.0]] == request.inputs[1].data.tolist()
    assert [b"abc", b""] == request.inputs[2].data.tolist()
    assert [{}, {}, {"a": 1}] == [tensor.parameters for tensor in request.inputs]


def test_every_input_may_be_json_in_a_binary_body() -> None:
    assert [[1.5, -2.0]] == read({"inputs": [X]}, b"").inputs[0].data.tolist()


def test_sizes_may_be_left_out_where_the_shape_says_them() -> None:
    """An extension of OVMS, for all datatypes except BYTES."""
    inputs = [binary("n", "INT32", [1, 2]), binary("x", "FP32", [2, 2])]
    tail = np.array([1, 2], "<i4").tobytes() + np.array([1, 2, 3, 4], "<f4").tobytes()

    request = read({"inputs": inputs}, tail)

    assert [[1, 2]] == request.inputs[0].data.tolist()
    assert [[1.0, 2.0], [3.0, 4.0]] == request.inputs[1].data.tolist()


def test_the_only_binary_input_may_be_bytes_of_unknown_size() -> None:
    """It takes the rest of the body (OVMS: the example of an encoded image)."""
    inputs = [X, binary("t", "BYTES", [2])]

    assert [b"ab", b"c"] == read({"inputs": inputs}, packed(b"ab", b"c")).inputs[1].data.tolist()


def test_a_bare_image_is_one_element() -> None:
    image = b"\xff\xd8\xff" + bytes(range(100))

    assert [image] == read({"inputs": [binary("t", "BYTES", [1])]}, image).inputs[0].data.tolist()


def test_bytes_beside_another_binary_input_need_their_size() -> None:
    inputs = [binary("x", "FP32", [1, 2]), binary("t", "BYTES", [1])]

    message = refusal(InvalidTensor, {"inputs": inputs}, bytes(8) + packed(b"a"))

    assert "input 't': expected a binary_data_size, since other inputs are binary" in message


@pytest.mark.parametrize(
    ("tensor", "tail", "message"),
    [
        (binary("x", "FP32", [1, 2], 8), 7, "8 bytes of binary data, got 7 bytes in the rest"),
        (binary("x", "FP32", [1, 2]), 7, "8 bytes of binary data, got 7 bytes in the rest"),
        (binary("x", "FP32", [1, 2], 7), 7, "expected 8 bytes for FP32[1,2], got 7 bytes"),
        (binary("x", "FP32", [1, 2], 9), 9, "expected 8 bytes for FP32[1,2], got 9 bytes"),
        (binary("x", "FP32", [2**62, 2**62]), 9, "bytes of binary data, got 9 bytes in the rest"),
        (binary("x", "FP32", [-1, 2]), 8, "expected a shape without negative dimensions"),
        (binary("x", "FP32", [-1, 2], 8), 8, "expected a shape without negative dimensions"),
        (binary("x", "FP32", [1] * 65), 4, "expected at most 64 dimensions, got 65"),
        (binary("t", "BYTES", [2], 9), 9, "expected"),
        (binary("x", "FP32", [1, 2], True), 8, "a binary_data_size of 0 or more bytes, got True"),
        (binary("x", "FP32", [1, 2], 8.0), 8, "a binary_data_size of 0 or more bytes, got 8.0"),
        (binary("x", "FP32", [1, 2], "8"), 8, "a binary_data_size of 0 or more bytes, got '8'"),
        (binary("x", "FP32", [1, 2], -8), 8, "a binary_data_size of 0 or more bytes, got -8"),
        (binary("x", "FP32", [1, 2], 2**62), 8, f"{2**62} bytes of binary data, got 8 bytes"),
        (binary("x", "FP32", [1, 2], 8) | {"data": [1, 2]}, 8, "got binary_data_size and data"),
        (binary("x", "FP32", [1, 2], 0) | {"data": []}, 0, "got binary_data_size and data"),
    ],
)
def test_binary_data_fits_its_description(
    tensor: dict[str, object], tail: int, message: str
) -> None:
    found = refusal(InvalidTensor, {"inputs": [tensor]}, bytes(tail))

    assert found.startswith(f"model 'm', input '{tensor['name']}': expected ")
    assert message in found


def test_binary_data_without_the_header_is_refused() -> None:
    tensor = binary("x", "FP32", [1, 2], 8)

    assert refusal(InvalidTensor, {"inputs": [tensor]}).endswith("got no such header")


@pytest.mark.parametrize("inputs", [[X], [binary("n", "INT32", [1, 2], 8)], []])
def test_bytes_behind_the_last_tensor_are_refused(inputs: list[dict[str, object]]) -> None:
    tail = bytes(8 * ("parameters" in (inputs or [{}])[0]) + 3)

    message = refusal(InvalidBody, {"inputs": inputs}, tail)

    assert "unexpected additional input data, 3 bytes after the last tensor" in message


def test_an_input_in_shared_memory_takes_no_bytes_of_the_body() -> None:
    tensor = binary("x", "FP32", [1, 2]) | {"parameters": {"shared_memory_region": "r"}}
    request = read({"inputs": [tensor, binary("n", "INT32", [1, 2])]}, bytes(8))
    shared = request.inputs[0]

    assert isinstance(shared, SharedInput)
    assert ((1, 2), 0) == (shared.shape, shared.data.size)
    message = refusal(InvalidTensor, {"inputs": [tensor | {"data": [1, 2]}]})
    assert "expected one of data, binary_data_size and shared_memory_region" in message
    assert "got data and shared_memory_region" in message
    both = {"shared_memory_region": "r", "binary_data_size": 8}
    message = refusal(InvalidTensor, {"inputs": [tensor | {"parameters": both}]})
    assert "got binary_data_size and shared_memory_region" in message


def test_binary_tensors_stay_where_they_are() -> None:
    """No byte is copied, whatever the alignment."""
    text = json.dumps({"inputs": [binary("x", "FP32", [4, 2], 32)]}).encode()
    for padding in range(4):
        body = bytearray(text + b" " * padding + bytes(32))
        request = read_infer_request(
            INFO, "m", "", memoryview(body), len(text) + padding, max_depth=100
        )

        body[-4:] = np.float32(1.5).tobytes()

        assert 1.5 == request.inputs[0].data[3, 1]


# # --- more inputs than the model ----------------------------------------------------------------


@pytest.mark.parametrize("tail", [None, bytes(8 * 400)])
def test_of_too_many_inputs_only_as_many_are_read_as_the_core_needs_to_refuse(
    tail: bytes | None,
) -> None:
    """One more than the model has: at least one is unknown or repeated."""
    tensor = X if tail is None else binary("x", "FP32", [1, 2], 8)

    request = read({"inputs": [tensor] * 400}, tail)

    assert 4 == len(request.inputs)
    with pytest.raises(DuplicateTensor):
        check_inputs("m", INFO, request)


def test_of_too_many_outputs_only_as_many_are_read_as_the_core_needs_to_refuse() -> None:
    request = read({"inputs": [X], "outputs": [{"name": str(i)} for i in range(100)]})

    assert 3 == len(request.outputs)
    with pytest.raises(UnknownTensor):
        check_outputs("m", INFO, request.outputs)


# # --- random bodies -----------------------------------------------------------------------------

SEEDS: list[tuple[bytes, bytes]] = [
    (
        json.dumps(
            {
                "id": 'a\u00e9\\"',
                "parameters": {"binary_data_output": True, "priority": 2, "f": -1.5e3},
                "inputs": [X, {"name": "t", "shape": [2], "datatype": "BYTES", "data": ["a", "]"]}],
                "outputs": [{"name": "y", "parameters": {"binary_data": False}}],
            }
        ).encode(),
        b"",
    ),
    (
        json.dumps(
            {"inputs": [binary("n", "INT32", [1, 2], 8), X, binary("t", "BYTES", [2], 11)]}
        ).encode(),
        bytes(8) + packed(b"abc", b""),
    ),
    (json.dumps({"inputs": [X | {"data": [[1, 2], [3, 4]], "shape": [2, 2]}]}).encode(), b""),
    (json.dumps({"inputs": [X | {"data": [[1], [2]]}]}).encode(), b""),
    (json.dumps({"inputs": [binary("t", "BYTES", [1])]}).encode(), b"\xff\xd8\xff" + bytes(9)),
]
TOKENS = [
    *(b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b"[[", b"]]", b"[]", b"{}", b'""', b" "),
    *(b"null", b"true", b"NaN", b"-Infinity", b"1e400", b"-0.0", b"0", b"-1", b"9" * 400),
    *(b"\xff", b"\\ud800", b'"name":"x"', b'"shape":[0]', b'"data":[]', b'"datatype":"BOOL"'),
    *(b'"BYTES"', b'"FP16"', b'"UINT64"', b'"binary_data_size":4', b'"shared_memory_region":""'),
]


def splice(random: Random, data: bytes) -> bytes:
    """Replace a few bytes by a JSON token."""
    at = random.randrange(len(data) + 1)
    return data[:at] + random.choice(TOKENS) + data[at + random.choice((0, 0, 1, 3)) :]


def damaged(random: Random) -> tuple[bytes, int | None]:
    text, tail = random.choice(SEEDS)
    other = random.choice(SEEDS)[0]
    for _ in range(random.choice((0, 1, 1, 1, 3))):
        text = splice(random, text) if random.random() < 0.8 else mutate(random, text, other)
    if random.random() < 0.1:
        tail = mutate(random, tail, bytes(4))
    lengths: list[int | None] = [len(text)] * 12
    lengths += [None, None, 0, random.randrange(len(text) + 9)]
    return text + tail, random.choice(lengths)


def test_any_body_is_a_request_or_a_refusal() -> None:
    """20,000 damaged bodies raise no other error, and cover both outcomes."""
    random = Random(5)
    outcomes = {True: 0, False: 0}
    for _ in range(20_000):
        body, length = damaged(random)
        try:
            read_infer_request(INFO, "m", "", memoryview(body), length, max_depth=10)
        except InvalidRequest:
            outcomes[False] += 1
        else:
            outcomes[True] += 1

    assert min(outcomes.values()) > 1000


DATA = [
    b"[",
    b"[",
    b"]",
    b"]",
    b",",
    b",",
    b"1",
    b"2.5",
    b'"a"',
    b'"]"',
    b" ",
    b"{}",
    b"null",
    b"NaN",
]


@pytest.mark.parametrize("datatype", ["FP32", "INT32", "BOOL", "BYTES", "BF16"])
def test_any_data_is_a_tensor_or_a_refusal(datatype: str) -> None:
    """4,000 short texts of JSON tokens, for tensors of zero to three elements."""
    random = Random(6)
    for _ in range(4000):
        data = b"[" + b"".join(random.choices(DATA, k=random.randint(1, 9))) + b"]"
        tensor = binary("x", datatype, [random.randrange(4)]) | {"data": "HERE"}
        text = json.dumps({"inputs": [tensor]}).encode().replace(b'"HERE"', data)
        try:
            (found,) = read(text).inputs
        except InvalidRequest:
            continue
        assert tensor["shape"] == list(found.data.shape)


@given(st.binary(max_size=60), st.none() | st.integers(-2, 70))
def test_any_bytes_are_a_request_or_a_refusal(body: bytes, length: int | None) -> None:
    try:
        request = read_infer_request(INFO, "m", "", memoryview(body), length, max_depth=10)
    except XlaserveError:
        return
    assert isinstance(request, InferRequest)


def one(**changes: object) -> dict[str, object]:
    return {"inputs": [X | changes]}


SHORT: dict[str, object] = {
    "ordinary": {"inputs": [X]},
    "with an id": {"id": "7", "inputs": [X]},
    "nulls": {"id": None, "parameters": None, "outputs": None, "inputs": [X]},
    "two tensors": {"inputs": [X, X | {"name": "z"}]},
    "more tensors than the model has": {"inputs": [X] * 5},
    "no tensor": {"inputs": []},
    "outputs": {"inputs": [X], "outputs": [{"name": "y"}]},
    "parameters": {"inputs": [X], "parameters": {"timeout": 5}},
    "bad parameters": {"inputs": [X], "parameters": {"a": None}},
    "parameters of a tensor": one(parameters={"a": 1}),
    "bad parameters of a tensor": one(parameters={"a": []}),
    "data and a binary size": one(parameters={"binary_data_size": 4}),
    "other keys": {"model_name": "other", "inputs": [X | {"x": {"y": [{}]}}]},
    "FP64": one(datatype="FP64"),
    "FP16": one(datatype="FP16"),
    "INT32": one(datatype="INT32", data=[1, 2]),
    "INT32 of a fraction": one(datatype="INT32", data=[1.0, 2]),
    "BOOL": one(datatype="BOOL", data=[True, False]),
    "BYTES": one(datatype="BYTES", data=["a", "b"]),
    "no datatype": one(datatype="FP31"),
    "nested": one(data=[[1, 2]]),
    "a scalar": one(shape=[], data=1),
    "a scalar in a list": one(shape=[], data=[1]),
    "no elements": one(shape=[0, 2], data=[]),
    "too few": one(data=[1]),
    "negative sizes": one(shape=[-1, -2]),
    "one negative size": one(shape=[-2], data=[1, 2]),
    "many dimensions": one(shape=[1] * 65, data=[1]),
    "a huge size": one(shape=[2**62, 2**62]),
    "a size of more bits": one(shape=[2**63]),
    "too large for FP32": one(data=[1e39, 0]),
    "large for FP64": one(datatype="FP64", data=[1e300, -1e300]),
    "a string among the numbers": one(data=[1, "2"]),
    "null among the numbers": one(data=[1, None]),
    "no data": {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2]}]},
    "null data": one(data=None),
    "no object": [],
    "NaN": b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[NaN,1]}]}',
    "too large for all": b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1e999]}]}',
    "twice": b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[[1]],"data":[2]}]}',
    "behind it": b'{"inputs":[]} 1',
    "no UTF-8": b'{"id":"\xff","inputs":[]}',
    "empty": b"",
    "deep": b'{"inputs":[],"x":' + b"[" * 50 + b"]" * 50 + b"}",
    "deep in a text": b'{"inputs":[],"x":"' + b"[" * 50 + b'"}',
}


@pytest.mark.parametrize("name", SHORT)
def test_a_short_request_is_read_as_any_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result depends on the bytes alone, not on which reader handles them."""

    def outcome() -> object:
        try:
            request = read(SHORT[name], depth=20)
        except XlaserveError as error:
            return type(error), str(error)
        arrays = [(tensor.data.dtype, tensor.data.tolist()) for tensor in request.inputs]
        named = [(tensor.name, tensor.datatype, tensor.parameters) for tensor in request.inputs]
        return request.id, request.outputs, request.parameters, arrays, named

    short = outcome()
    monkeypatch.setattr(infer_request, "_SHORT_BYTES", -1)

    assert outcome() == short


def test_an_ordinary_short_request_is_read_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would compare the general path with itself."""
    monkeypatch.setattr(infer_request, "_decode", None)

    assert [[1.5, -2.0]] == read(SHORT["ordinary"]).inputs[0].data.tolist()
    assert "7" == read(SHORT["with an id"]).id
