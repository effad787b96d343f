"""Parameters of inference requests over gRPC and REST: one core decides, for both alike."""

# pyright: reportAttributeAccessIssue=false
# protobuf makes the classes of service_pb2 when it is imported, where no checker sees them.

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from structlog.testing import capture_logs
from support.doubling import export_double
from support.http import ask
from support.server import RunningServer, Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

WRONG: list[tuple[str, Any, str]] = [
    ("timeout", -1, "an integer of 0 or more, got -1"),
    ("timeout", "5", "an integer of 0 or more, got '5'"),
    ("timeout", True, "an integer of 0 or more, got True"),
    ("timeout", 1.5, "an integer of 0 or more, got 1.5"),
    ("priority", -3, "an integer of 0 or more, got -3"),
    ("priority", "high", "an integer of 0 or more, got 'high'"),
    ("sequence_id", -1, "a string, or an integer of 0 or more, got -1"),
    ("sequence_id", True, "a string, or an integer of 0 or more, got True"),
    ("sequence_start", 1, "true or false, got 1"),
    ("sequence_end", "true", "true or false, got 'true'"),
    ("binary_data_output", 1, "true or false, got 1"),
    ("triton_enable_empty_final_response", "x", "true or false, got 'x'"),
    ("triton_other", 1, "a name that does not start with 'triton_', got 1"),
]

HARMLESS = {
    "sequence_id": 7,
    "sequence_start": True,
    "sequence_end": False,
    "priority": 2,
    "timeout": 500,
    "mine": "x",
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that doubles."""
    root = tmp_path_factory.mktemp("models")
    export_double(root)
    return root


@pytest.fixture
async def server(serve: Serve, repository: Path) -> AsyncIterator[RunningServer]:
    async with serve(repository, load_model=("double",), http_endpoint="port:0") as running:
        yield running


@pytest.fixture
async def stub(server: RunningServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def put(parameters: Any, given: dict[str, Any]) -> None:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in given.items():
        setattr(parameters[name], kinds[type(value)], value)


async def over_grpc(
    stub: Any, given: dict[str, Any], of_output: dict[str, Any] | None = None
) -> tuple[str, str]:
    """Return the code and the text of an error, or OK and the answer."""
    data = np.array([[1, 2]], np.float32)
    request = pb.ModelInferRequest(model_name="double", raw_input_contents=[data.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=data.shape)
    put(request.parameters, given)
    if of_output is not None:
        put(request.outputs.add(name="y").parameters, of_output)
    try:
        response = await stub.ModelInfer(request)
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", str(np.frombuffer(response.raw_output_contents[0], np.float32).tolist())


async def over_rest(
    server: RunningServer, given: dict[str, Any], of_output: dict[str, Any] | None = None
) -> tuple[int, str]:
    assert server.http is not None
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
    body: dict[str, Any] = {"inputs": [tensor], "parameters": given}
    if of_output is not None:
        body["outputs"] = [{"name": "y", "parameters": of_output}]
    path = "/v2/models/double/infer"
    answer = await ask(server.http, "POST", path, body=json.dumps(body).encode())
    if answer.status != 200:
        return answer.status, answer.error
    return 200, str([float(value) for value in answer.json["outputs"][0]["data"]])


async def test_a_value_that_a_parameter_cannot_have_is_refused_alike(
    server: RunningServer, stub: Any
) -> None:
    for name, value, text in WRONG:
        code, told = await over_grpc(stub, {name: value})
        status, read = await over_rest(server, {name: value})

        assert ("INVALID_ARGUMENT", 400) == (code, status), name
        assert f"parameter '{name}': expected {text}" == told
        # REST reads the one that is its own, and says the same in fewer words.
        assert read == told or name == "binary_data_output"


async def test_parameters_without_effect_change_no_answer_and_are_named_once(
    server: RunningServer, stub: Any
) -> None:
    with capture_logs() as lines:
        answers = [await over_grpc(stub, HARMLESS) for _ in range(3)]
        answers += [await over_grpc(stub, HARMLESS, {})]
        read = [await over_rest(server, HARMLESS) for _ in range(3)]
    named = [line["parameters"] for line in lines if "without effect" in line["event"]]

    assert [("OK", "[2.0, 4.0]")] * 4 == answers
    assert [(200, "[2.0, 4.0]")] * 3 == read
    assert [sorted(HARMLESS)] == [sorted(names) for names in named]


async def test_sequences_of_64_bits_without_a_sign(stub: Any, server: RunningServer) -> None:
    """Triton has them as uint64."""
    data = np.array([[1, 2]], np.float32)
    request = pb.ModelInferRequest(model_name="double", raw_input_contents=[data.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=data.shape)
    request.parameters["sequence_id"].uint64_param = 2**64 - 1
    await stub.ModelInfer(request)

    assert 200 == (await over_rest(server, {"sequence_id": 2**64 - 1}))[0]
    assert 400 == (await over_rest(server, {"sequence_id": 2**64}))[0]


async def test_a_wrong_parameter_of_an_output_is_told_alike(
    server: RunningServer, stub: Any
) -> None:
    wrong = {"classification": -1}
    code, told = await over_grpc(stub, {}, wrong)

    assert ("INVALID_ARGUMENT", 400, told) == (code, *await over_rest(server, {}, wrong))
