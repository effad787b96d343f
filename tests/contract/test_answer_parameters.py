"""Tensor parameters passed to Python models, and parameters that they return to clients."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton
from structlog.testing import capture_logs
from support.asking import Client, client, given
from support.python_models import write
from support.server import serving
from tritonclient.grpc import service_pb2

pb: Any = service_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = """
from xlaserve import Answer
import json

class Echo(PythonModel):
    inputs = {"x": ("FP32", [-1])}
    outputs = {"y": ("FP32", [-1]), "said": ("BYTES", [1])}

    def infer(self, inputs, request):
        said = {"inputs": request.input_parameters, "outputs": request.output_parameters}
        said = {kind: {n: dict(p) for n, p in found.items()} for kind, found in said.items()}
        outputs = {"y": inputs["x"], "said": [json.dumps(said).encode()]}
        own = {"truth": True, "count": 2**63, "less": np.int64(-5), "part": 0.5, "text": "naïve"}
        return Answer(outputs, own, {"y": {"unit": "m"}})
"""
MANY = """
from xlaserve import Answer

class Many(PythonModel):
    inputs = {"x": ("FP32", [-1])}
    outputs = {"y": ("FP32", [-1])}

    def infer(self, inputs):
        for number in range(2):
            yield Answer({"y": inputs["x"]}, {"number": number})
        yield {"y": inputs["x"]}
"""
WRONG = """
from xlaserve import Answer

class Wrong(PythonModel):
    inputs = {"x": ("FP32", [-1])}
    outputs = {"y": ("FP32", [-1])}

    def infer(self, inputs, request):
        wrong = {
            "list": ({"a": [1]}, {}), "nan": ({"a": float("nan")}, {}), "large": ({"a": 2**64}, {}),
            "half": ({"a": "\\ud800"}, {}), "name": ({"triton_final_response": True}, {}),
            "size": ({}, {"y": {"binary_data_size": 4}}), "output": ({}, {"z": {"a": 1}}),
        }[request.parameters["case"]]
        return Answer({"y": inputs["x"]}, *wrong)
"""
TRITON = """
import json
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            parameters = {"served": 1}
            if json.loads(request.parameters()).get("ask"):
                inner = pb_utils.InferenceRequest(
                    model_name="triton", requested_output_names=["y"], inputs=[x]
                ).exec()
                parameters = {"inner": inner.parameters()}
            outputs = [pb_utils.Tensor("y", x.as_numpy())]
            answers.append(pb_utils.InferenceResponse(outputs, parameters=parameters))
        return answers
"""
ONE = """
input [{ name: "x", data_type: TYPE_FP32, dims: [ -1 ] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ -1 ] }]
"""
PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'
TOLD = {"truth": True, "count": 2**63, "less": -5, "part": 0.5, "text": "naïve"}
x = np.array([1, 2], np.float32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """A client of a server whose models return parameters."""
    root: Path = tmp_path_factory.mktemp("models")
    write(root, "echo", ECHO)
    write(root, "apart", ECHO, PROCESS)
    write(root, "many", MANY)
    write(root, "wrong", WRONG)
    write(root, "cached", ECHO, "response_cache { enable: true }")
    write(root, "triton", TRITON, ONE + "instance_group { count: 2 kind: KIND_CPU }", begin="")
    write(root, "triton_apart", TRITON, ONE + PROCESS, begin="")
    scratch = tmp_path_factory.mktemp("scratch")
    settings: dict[str, Any] = {"load_model": ("*",), "allow_python_models": True}
    async with (
        serving(scratch, root, http_endpoint="port:0", **settings) as server,
        client(server) as found,
    ):
        yield found


def asking(model: str, **more: Any) -> dict[str, Any]:
    """Return a JSON request."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2], **more}
    return {"id": "i", "inputs": [tensor]}


async def post(asked: Client, path: str, body: dict[str, Any], accept: str = "*/*") -> str:
    """Return the body of an HTTP answer, also if it is an error."""
    request = urllib.request.Request(
        f"http://{asked.server.http}/v2/models/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Accept": accept},
    )

    def ask() -> str:
        try:
            with urllib.request.urlopen(request) as answer:
                return str(answer.read().decode(errors="replace"))
        except urllib.error.HTTPError as error:
            return str(error.read().decode())

    return await asyncio.to_thread(ask)


def plain(parameters: Any) -> dict[str, Any]:
    """Return the values of a gRPC parameter map."""
    return {n: getattr(p, p.WhichOneof("parameter_choice")) for n, p in parameters.items()}


@pytest.mark.parametrize("model", ["echo", "apart", "cached"])
async def test_code_is_given_parameters_of_tensors_and_gives_its_own(
    asked: Client, model: str
) -> None:
    """Parameters of the shared memory and classification extensions are hidden from the code."""
    tensor: Any = given(triton, "x", x)
    tensor._get_tensor().parameters["scale"].double_param = 2.5
    wanted: Any = [triton.InferRequestedOutput("said"), triton.InferRequestedOutput("y")]
    wanted[0]._get_tensor().parameters["as"].string_param = "text"
    wanted[1]._get_tensor().parameters["classification"].int64_param = 0
    result: Any = await asked.grpc.infer(model, [tensor], outputs=wanted, request_id="i")
    over_grpc = result.get_response()
    body = asking(model, parameters={"scale": 2.5})
    outputs = [{"name": "said", "parameters": {"as": "text"}}, {"name": "y"}]
    over_http = json.loads(await post(asked, f"{model}/infer", {**body, "outputs": outputs}))

    said = {"inputs": {"x": {"scale": 2.5}}, "outputs": {"said": {"as": "text"}}}
    assert said == json.loads(result.as_numpy("said")[0])
    assert said == json.loads(over_http["outputs"][0]["data"][0])
    assert (TOLD, "i") == (plain(over_grpc.parameters), over_grpc.id)
    assert "uint64_param" == over_grpc.parameters["count"].WhichOneof("parameter_choice")
    assert [{}, {"unit": "m"}] == [plain(one.parameters) for one in over_grpc.outputs]
    assert [1.0, 2.0] == result.as_numpy("y").tolist()
    assert (TOLD, "i") == (over_http["parameters"], over_http["id"])
    assert [None, {"unit": "m"}] == [one.get("parameters") for one in over_http["outputs"]]


async def test_binary_outputs_have_their_parameters_beside_their_size(asked: Client) -> None:
    body = {**asking("echo"), "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    text = await post(asked, "echo/infer", body)
    found, _ = json.JSONDecoder().raw_decode(text)

    assert [{"unit": "m", "binary_data_size": 8}] == [o["parameters"] for o in found["outputs"]]
    assert TOLD == found["parameters"]


async def test_typed_requests_are_answered_with_parameters(asked: Client) -> None:
    message = pb.ModelInferRequest(model_name="echo")
    message.inputs.add(name="x", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1, 2])
    answer = await asked.grpc._client_stub.ModelInfer(message)

    assert TOLD == plain(answer.parameters)
    assert [1.0, 2.0] == list(answer.outputs[0].contents.fp32_contents)
    assert {"unit": "m"} == plain(answer.outputs[0].parameters)


async def test_each_answer_of_a_stream_has_its_own(asked: Client) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "many", "inputs": [given(triton, "x", x)]}

    found = []
    stream: Any = asked.grpc.stream_infer(requests())
    async for result, _ in stream:
        found.append(plain(result.get_response().parameters))
        if len(found) == 3:
            stream.cancel()
            break
    text = await post(asked, "many/infer", asking("many"), "text/event-stream")
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]

    numbers = [{"number": 0}, {"number": 1}, {}]
    assert [{**own, "triton_final_response": False} for own in numbers] == found
    assert found == [event["parameters"] for event in events[:3]]
    assert {"triton_final_response": True} == events[-1]["parameters"]


async def test_generate_has_parameters_of_answers_as_fields(asked: Client) -> None:
    text = await post(asked, "echo/generate", {"x": [1, 2]})

    assert TOLD | {"model_name": "echo", "y": [1.0, 2.0]} == {
        name: value
        for name, value in json.loads(text).items()
        if name in {"model_name", "y", *TOLD}
    }


async def test_an_answer_with_parameters_is_not_kept(asked: Client) -> None:
    """The parameters belong to one execution, so a cached answer would lack them."""
    body = asking("cached")
    found = [json.loads(await post(asked, "cached/infer", body)) for _ in range(2)]

    assert [TOLD, TOLD] == [one["parameters"] for one in found]


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("list", "its code: expected parameter 'a' to be a boolean, a 64-bit integer"),
        ("nan", "a finite number or a string, got nan"),
        ("large", "a 64-bit integer, a finite number or a string, got 18446744073709551616"),
        ("half", "a finite number or a string, got '\\ud800'"),
        ("name", "expected parameter names to be strings other than binary_data_size"),
        ("size", "output 'y' of its code: expected parameter names"),
        ("output", "expected parameters of its outputs (y), got those of 'z'"),
    ],
)
async def test_a_parameter_that_nobody_can_be_told_fails_the_request(
    asked: Client, case: str, problem: str
) -> None:
    text = await asked.fails("wrong", x=x, parameters={"case": case})

    assert text.startswith("INTERNAL: model 'wrong': ")
    assert problem in text


@pytest.mark.parametrize("model", ["triton", "triton_apart"])
async def test_models_of_tritons_interface_give_parameters(asked: Client, model: str) -> None:
    """`InferenceResponse(parameters=...)`, and parameters of a nested call's answer."""
    body = asking(model)
    found = [
        json.loads(await post(asked, f"{model}/infer", {**body, "parameters": parameters}))
        for parameters in ({}, {"ask": True})
    ]

    assert [{"served": 1}, {"inner": '{"served": 1}'}] == [one["parameters"] for one in found]


async def test_what_reaches_the_code_is_not_named_as_without_effect(asked: Client) -> None:
    own = {"mine": 1}
    with capture_logs() as logs:
        for model in ("echo", "triton"):
            body = asking(model, parameters=own)
            await post(asked, f"{model}/infer", {**body, "parameters": own})

    named = [one for one in logs if one["event"] == "request parameters without effect"]
    # Triton's interface has no parameters for inputs.
    assert [("triton", ["mine"])] == [(one["model"], one["parameters"]) for one in named]
