"""Sequences in ensembles: those of the request, and those that steps set."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton
from support.asking import Client, client, given
from support.engines import own_engine_only
from support.http import ask
from support.python_models import write
from support.server import serving
from tritonclient.utils import InferenceServerException

from xlaserve.serving.stations import ensemble as ensembles

pytestmark = pytest.mark.asyncio(loop_scope="module")

BEGIN = "import json\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n\n"
SUMS = """
class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            known = request.correlation_id()
            if request.flags() & 1:
                self.sums[known] = 0.0
            self.sums[known] = self.sums.get(known, 0.0) + float(x.sum())
            seen = json.dumps([known, request.flags(), request.request_id()]).encode()
            answers.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("y", np.full_like(x, self.sums[known])),
                pb_utils.Tensor("seen", np.array([[seen]], np.object_)),
            ]))
        return answers
"""
SAYS = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            said = json.loads(json.loads(request.parameters()).get(NAME, "null"))
            y = pb_utils.Tensor("y", request.inputs()[0].as_numpy() + 1)
            answers.append(pb_utils.InferenceResponse([y], parameters=said))
        return answers
"""
MANY = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            x = request.inputs()[0].as_numpy()
            for number in range(3):
                said = {"sequence_start": number == 0, "sequence_end": number == 2}
                y = pb_utils.Tensor("y", x)
                sender.send(pb_utils.InferenceResponse([y], parameters=said))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
OURS = """
from xlaserve import Answer, PythonModel
import json

class Says(PythonModel):
    def infer(self, inputs, request):
        return Answer({"y": inputs["x"] + 1}, json.loads(request.parameters["say"]))
"""
PLAIN = """
from xlaserve import PythonModel

class Plain(PythonModel):
    def infer(self, inputs):
        return {"y": inputs["x"] + 1}
"""


def tensors(*outputs: str) -> str:
    kinds = {"y": "FP32", "seen": "STRING"}
    lines = [f'{{ name: "{o}", data_type: TYPE_{kinds[o]}, dims: [ 1 ] }}' for o in outputs]
    return f"""
max_batch_size: 4
input [{{ name: "x", data_type: TYPE_FP32, dims: [ 1 ] }}]
output [{", ".join(lines)}]
"""


SEQUENCES = """
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  control_input [{
    name: "CORRID"
    control [{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING }]
  }]
}
"""
DECOUPLED = "model_transaction_policy { decoupled: True }"
PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'
STRICT = 'parameters { key: "strict_outputs" value { string_value: "true" } }'


def step(model: str, takes: str, **makes: str) -> str:
    maps = [f'input_map {{ key: "x" value: "{takes}" }}']
    maps += [f'output_map {{ key: "{o}" value: "{t}" }}' for o, t in makes.items()]
    return f'{{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'


def ensemble(root: Path, name: str, *steps: str, config: str = "") -> None:
    (root / name / "1").mkdir(parents=True)
    chain = ", ".join(steps)
    text = f'platform: "ensemble"\n{config or tensors("y", "seen")}\n'
    (root / name / "config.pbtxt").write_text(f"{text}ensemble_scheduling {{ step [{chain}] }}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """A client of a server with ensembles in which each kind of step sets a sequence."""
    root: Path = tmp_path_factory.mktemp("models")
    write(root, "sums", SUMS, tensors("y", "seen") + SEQUENCES, begin=BEGIN)
    write(root, "says", f"NAME = 'say'\n{SAYS}", tensors("y"), begin=BEGIN)
    write(root, "also", f"NAME = 'also'\n{SAYS}", tensors("y"), begin=BEGIN)
    write(root, "apart", f"NAME = 'say'\n{SAYS}", tensors("y") + PROCESS, begin=BEGIN)
    write(root, "strict", f"NAME = 'say'\n{SAYS}", tensors("y") + STRICT, begin=BEGIN)
    write(root, "plain", PLAIN, tensors("y"), begin="")
    write(root, "ours", OURS, tensors("y"), begin="")
    write(root, "many", MANY, tensors("y") + DECOUPLED, begin=BEGIN)
    twice = step("sums", "x", y="a", seen="b"), step("sums", "a", y="y", seen="seen")
    ensemble(root, "own", step("also", "x", y="a"), step("sums", "a", y="y", seen="seen"))
    ensemble(root, "twice", *twice)
    for name in ("says", "apart", "strict", "ours"):
        ensemble(root, f"of_{name}", step(name, "x", y="t"), step("sums", "t", y="y", seen="seen"))
        ensemble(root, f"last_{name}", step(name, "x", y="y"), config=tensors("y"))
    ensemble(root, "within", step("last_says", "x", y="t"), step("sums", "t", y="y", seen="seen"))
    through = step("plain", "t", y="u"), step("sums", "u", y="y", seen="seen")
    ensemble(root, "through", step("says", "x", y="t"), *through)
    ensemble(root, "each", step("many", "x", y="t"), step("sums", "t", y="y", seen="seen"))
    scratch = tmp_path_factory.mktemp("scratch")
    settings: dict[str, Any] = {"load_model": ("*",), "allow_python_models": True}
    async with (
        serving(scratch, root, http_endpoint="port:0", **settings) as server,
        client(server) as found,
    ):
        yield found


async def infer(asked: Client, name: str, **more: Any) -> tuple[Any, dict[str, Any]]:
    """Return y, what the sequence model saw, and the answer's parameters."""
    x = given(triton, "x", np.ones((1, 1), np.float32))
    result: Any = await asked.grpc.infer(name, [x], request_id="r", **more)
    response = result.get_response()
    told = {n: getattr(v, v.WhichOneof("parameter_choice")) for n, v in response.parameters.items()}
    seen = result.as_numpy("seen")
    return (result.as_numpy("y").item(), seen is not None and json.loads(seen.item())), told


async def test_each_step_has_the_sequence_and_id_of_the_request(asked: Client) -> None:
    """Over gRPC and REST; the answer has no sequence parameters if no step sets them."""
    found = [
        await infer(asked, "own", sequence_id=7, sequence_start=start, sequence_end=end)
        for start, end in ((True, False), (False, False), (False, True))
    ]
    (total, _), _ = await infer(
        asked, "twice", sequence_id="s", sequence_start=True, sequence_end=True
    )
    x = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}
    parameters = {"sequence_id": 8, "sequence_start": True, "sequence_end": True}
    body = json.dumps({"id": "r", "parameters": parameters, "inputs": [x]})
    by_rest = await ask(str(asked.server.http), "POST", "/v2/models/own/infer", body=body.encode())
    with pytest.raises(InferenceServerException, match="must specify a non-zero"):
        await infer(asked, "own")

    assert [((2 * n, [7, flags, "r"]), {}) for n, flags in ((1, 1), (2, 0), (3, 2))] == found
    assert 1 == total
    answer = json.loads(by_rest.body)
    assert "parameters" not in answer
    assert [8, 3, "r"] == json.loads(answer["outputs"][1]["data"][0])


WHOLE = {"sequence_start": True, "sequence_end": True}
NONE = {"sequence_start": False, "sequence_end": False}
NAMED: tuple[tuple[dict[str, Any], list[Any], dict[str, Any]], ...] = (
    ({"sequence_id": 41, **WHOLE}, [41, 3], {"sequence_id": 41, **WHOLE}),
    ({"sequence_id": "b", **WHOLE}, ["b", 3], {"sequence_id": "b", **WHOLE}),
    (WHOLE, [9, 3], {"sequence_id": 9, **WHOLE}),
    ({"sequence_start": True}, [9, 1], {**NONE, "sequence_id": 9, "sequence_start": True}),
    ({"sequence_end": True, **WHOLE, "unit": "m"}, [9, 3], {"sequence_id": 9, **WHOLE}),
    ({"unit": "m"}, [9, 3], {}),
)
"""What a step sets for sequence 9, what the next step sees, and what the client gets."""


@pytest.mark.parametrize(
    "kind", ["of_says", "of_apart", "of_strict", "of_ours", "within", "through"]
)
async def test_a_step_names_the_sequence_of_all_behind_it(asked: Client, kind: str) -> None:
    """As in Triton, a missing id is taken from the request; missing start and end are false.

    Later steps that set nothing pass the sequence on to the next step and to the client.
    """
    found = []
    for said, _, _ in NAMED:
        asks = {
            "sequence_start": True,
            "sequence_end": True,
            "parameters": {"say": json.dumps(said)},
        }
        (_, seen), told = await infer(asked, kind, sequence_id=9, **asks)
        found.append((said, seen[:2], told))

    assert [(said, seen, told) for said, seen, told in NAMED] == found


@pytest.mark.parametrize("kind", ["says", "apart", "strict", "ours"])
async def test_a_client_is_told_the_sequence_that_the_last_step_has_named(
    asked: Client, kind: str
) -> None:
    found = []
    for said, _, _ in NAMED:
        asks = {"sequence_id": 9, "parameters": {"say": json.dumps(said)}}
        _, told = await infer(asked, f"last_{kind}", **asks)
        found.append(told)
    x = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}
    said = {"say": json.dumps({"sequence_id": "b", "sequence_start": True})}
    body = json.dumps({"parameters": said, "inputs": [x]}).encode()
    by_rest = await ask(str(asked.server.http), "POST", f"/v2/models/last_{kind}/infer", body=body)

    assert [told for _, _, told in NAMED] == found
    expected = {"sequence_id": "b", "sequence_start": True, "sequence_end": False}
    assert expected == json.loads(by_rest.body)["parameters"]


@pytest.mark.parametrize(
    "said", [{"sequence_id": True}, {"sequence_start": 1}, {"sequence_end": "yes"}]
)
async def test_a_step_that_names_a_wrong_sequence_fails_its_request(
    asked: Client, said: dict[str, Any]
) -> None:
    with pytest.raises(InferenceServerException) as raised:
        await infer(asked, "of_says", sequence_id=9, parameters={"say": json.dumps(said)})

    (name,) = said
    assert "StatusCode.INVALID_ARGUMENT" == raised.value.status()
    assert f"'{name}'" in str(raised.value.message())


class Panic(BaseException):
    """Like the exception that PyO3 raises when Rust code panics."""


@own_engine_only
@pytest.mark.parametrize("kind", [RuntimeError, Panic])
async def test_whatever_an_answer_fails_with_is_told(
    asked: Client, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def fails(*_: Any) -> Any:
        raise kind("no such attribute")

    monkeypatch.setattr(ensembles, "respond", fails)
    said = {"say": json.dumps(WHOLE)}
    with pytest.raises(InferenceServerException) as raised:
        await infer(asked, "last_says", sequence_id=9, parameters=said, client_timeout=20)

    assert "StatusCode.INTERNAL" == raised.value.status()


async def test_each_answer_of_a_decoupled_step_may_be_a_request_of_a_sequence(
    asked: Client,
) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        x = given(triton, "x", np.ones((1, 1), np.float32))
        yield {"model_name": "each", "inputs": [x], "sequence_id": 5}

    found = []
    async with asyncio.timeout(60):
        answers: Any = asked.grpc.stream_infer(requests())
        async for result, error in answers:
            assert error is None
            seen = json.loads(result.as_numpy("seen").item())
            found.append((result.as_numpy("y").item(), seen[:2]))
            if len(found) == 3:
                break

    assert [(1, [5, 1]), (2, [5, 0]), (3, [5, 2])] == found
