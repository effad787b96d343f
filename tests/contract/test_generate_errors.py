"""Model errors in `generate_stream` are events, as in Triton."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support.http import Answer, ask
from support.python_models import write
from support.server import RunningServer, serving

from xlaserve.client import AsyncClient, CallFailed

pytestmark = pytest.mark.asyncio(loop_scope="module")

BEGIN = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n\n"
FAILED = 'pb_utils.InferenceResponse(error=pb_utils.TritonError("no luck", CODE))'
ONE = f"""
class TritonPythonModel:
    def execute(self, requests):
        return [{FAILED} for request in requests]
"""
RAISES = """
class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("no luck")
"""
MANY = f"""
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            x = request.inputs()[0].as_numpy()
            for _ in range(int(x.ravel()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
            sender.send({FAILED}, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TENSORS = """
input [{ name: "x", data_type: TYPE_FP32, dims: [ 1 ] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ 1 ] }]
"""
DECOUPLED = "model_transaction_policy { decoupled: True }"
PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'
STATUSES = {"one": 500, "invalid": 400, "raises": 500, "many": 500, "apart": 500}
"""HTTP status of each model's error."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    root: Path = tmp_path_factory.mktemp("models")
    internal, invalid = (f"pb_utils.TritonError.{name}" for name in ("INTERNAL", "INVALID_ARG"))
    write(root, "one", ONE.replace("CODE", internal), TENSORS, begin=BEGIN)
    write(root, "invalid", ONE.replace("CODE", invalid), TENSORS, begin=BEGIN)
    write(root, "raises", RAISES, TENSORS, begin=BEGIN)
    many = MANY.replace("CODE", internal)
    write(root, "many", many, TENSORS + DECOUPLED, begin=BEGIN)
    write(root, "apart", many, TENSORS + DECOUPLED + PROCESS, begin=BEGIN)
    scratch = tmp_path_factory.mktemp("scratch")
    settings: dict[str, Any] = {"load_model": ("*",), "allow_python_models": True}
    async with serving(scratch, root, http_endpoint="port:0", **settings) as running:
        yield running


async def generated(server: RunningServer, model: str, verb: str, body: Any) -> Answer:
    path = f"/v2/models/{model}/{verb}"
    return await ask(str(server.http), "POST", path, body=json.dumps(body).encode())


@pytest.mark.parametrize("model", STATUSES)
async def test_an_error_before_all_answers_is_an_event_with_its_status(
    server: RunningServer, model: str
) -> None:
    answer = await generated(server, model, "generate_stream", {"x": 0})

    assert STATUSES[model] == answer.status
    assert "text/event-stream; charset=utf-8" == answer.headers["content-type"]
    data, end = answer.body.removeprefix(b"data: ").split(b"\n\n")
    assert b"" == end
    assert "no luck" in json.loads(data)["error"]


@pytest.mark.parametrize("model", STATUSES)
@pytest.mark.parametrize(
    ("verb", "body"),
    [("generate", {"x": 0}), ("generate_stream", {}), ("generate_stream", {"x": "a"})],
)
async def test_what_is_no_stream_is_refused_in_json(
    server: RunningServer, model: str, verb: str, body: Any
) -> None:
    """Models with one answer, and requests that never reach a model."""
    answer = await generated(server, model, verb, body)

    assert (STATUSES[model] if verb == "generate" else 400) == answer.status
    assert "application/json" == answer.headers["content-type"]
    assert answer.error


@pytest.mark.parametrize("answers", [0, 2])
async def test_our_client_reads_the_error(server: RunningServer, answers: int) -> None:
    found = []

    async def read(client: AsyncClient) -> None:
        async for answer in client.stream("many", {"x": np.array([answers], np.float32)}):
            found.append(answer["y"].tolist())

    async with AsyncClient(f"http://{server.http}") as client:
        with pytest.raises(CallFailed) as raised:
            await read(client)

    assert [[float(answers)]] * answers == found
    assert "model 'many': no luck" in raised.value.problem
    assert "data:" not in raised.value.problem
