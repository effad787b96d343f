"""Python models with Triton's interface, used as in the examples of its python backend."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from support.asking import given
from support.python_models import Start, starting, write
from support.server import Serve

from xlaserve.python_models.triton.copies import TritonCopy
from xlaserve.runtime.calls import current_request
from xlaserve.runtime.handling import UnsentRequest
from xlaserve.runtime.loaded import ModelInfo

BEGIN = "import json\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n\n"
PAIR = """
input [{ name: "A", data_type: TYPE_FP32, dims: [ 2 ] }]
input [{ name: "B", data_type: TYPE_FP32, dims: [ 2 ] }]
output [{ name: "SUM", data_type: TYPE_FP32, dims: [ 2 ] }]
output [{ name: "LESS", data_type: TYPE_FP32, dims: [ 2 ] }]
"""
ONE = """
input [{ name: "x", data_type: TYPE_INT32, dims: [ 1 ] }]
output [{ name: "y", data_type: TYPE_INT32, dims: [ 1 ] }]
"""
DECOUPLED = "model_transaction_policy { decoupled: True }"
ADD = """
class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        assert config["max_batch_size"] == 0 and config["input"][0]["dims"] == [2]
        assert config["parameters"] == {"key": {"string_value": "value"}}, config["parameters"]
        assert args["model_name"] == "add" and args["model_version"] == "1"
        one = pb_utils.get_output_config_by_name(config, "SUM")
        self.dtype = pb_utils.triton_string_to_numpy(one["data_type"])

    def execute(self, requests):
        answers = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "B").as_numpy()
            a += 0  # inputs may be written to
            total = pb_utils.Tensor("SUM", (a + b).astype(self.dtype))
            less = pb_utils.Tensor.from_dlpack("LESS", pb_utils.Tensor("t", a - b).to_dlpack())
            answers.append(pb_utils.InferenceResponse(output_tensors=[total, less]))
        return answers
"""
COUNT = """
import threading

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            sender = request.get_response_sender()
            threading.Thread(target=self.send, args=(sender, int(x[0]))).start()

    def send(self, sender, count):
        for number in range(count):
            y = pb_utils.Tensor("y", np.array([number], np.int32))
            sender.send(pb_utils.InferenceResponse([y]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
PARAMETERS = 'parameters { key: "key" value { string_value: "value" } }'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def start(serve: Serve, root: Path) -> Start:
    return starting(serve, root)


def model(root: Path, name: str, code: str, config: str = ONE) -> Path:
    return write(root, name, code, config, begin=BEGIN)


def execute(root: Path, name: str, body: str, config: str = ONE, kind: str = "def") -> None:
    """Write a model with this `execute` body, in which `y` makes a response."""
    lines = "\n".join("        " + line for line in body.strip("\n").splitlines())
    model(
        root,
        name,
        f"class TritonPythonModel:\n    {kind} execute(self, requests):\n{lines}\n\n"
        "def y(value):\n    tensor = pb_utils.Tensor('y', np.asarray(value))\n"
        "    return pb_utils.InferenceResponse([tensor])\n",
        config,
    )


a = np.array([1, 2], np.float32)
b = np.array([10, 20], np.float32)
one = np.ones(1, np.int32)


async def test_an_ordinary_model_answers(start: Any, root: Path) -> None:
    model(root, "add", ADD, PAIR + PARAMETERS)
    async with start() as client:
        outputs = await client.infer("add", A=a, B=b)
        chosen = await client.infer("add", wanted=["LESS"], A=a, B=b)
        metadata = await client.grpc.get_model_metadata("add")

    assert {"SUM": [11, 22], "LESS": [-9, -18]} == {n: v.tolist() for n, v in outputs.items()}
    assert {"LESS": [-9, -18]} == {n: v.tolist() for n, v in chosen.items()}
    assert metadata.platform == "python"


async def test_other_models_are_called_as_bls_does(start: Any, root: Path) -> None:
    model(root, "add", ADD, PAIR + PARAMETERS)
    execute(
        root,
        "sync",
        """
request, = requests
call = pb_utils.InferenceRequest(model_name=b"add", inputs=request.inputs(),
                                 requested_output_names=["SUM", "LESS"])
return [pb_utils.InferenceResponse(call.exec().output_tensors())]
""",
        PAIR,
    )
    execute(
        root,
        "awaits",
        """
import asyncio
answers = []
for request in requests:
    calls = [pb_utils.InferenceRequest(model_name="add", inputs=request.inputs(),
                                       requested_output_names=[name]).async_exec()
             for name in ("SUM", "LESS")]
    found = await asyncio.gather(*calls)
    answers.append(pb_utils.InferenceResponse(sum([f.output_tensors() for f in found], [])))
return answers
""",
        PAIR,
        "async def",
    )
    execute(
        root,
        "lost",
        """
answer = pb_utils.InferenceRequest(model_name="none_such", inputs=requests[0].inputs(),
                                   requested_output_names=["y"]).exec()
assert answer.has_error() and answer.error().code() == pb_utils.TritonError.NOT_FOUND
raise pb_utils.TritonModelException(answer.error().message())
""",
    )
    async with start() as client:
        found = [await client.infer(name, A=a, B=b) for name in ("sync", "awaits")]
        lost = await client.fails("lost", x=one)

    for outputs in found:
        assert {"SUM": [11, 22], "LESS": [-9, -18]} == {n: v.tolist() for n, v in outputs.items()}
    assert "INTERNAL: model 'lost': TritonModelException: Request for unknown model" in lost


async def test_a_decoupled_model_sends_answers_from_its_threads(start: Any, root: Path) -> None:
    model(root, "count", COUNT, ONE + DECOUPLED)
    execute(
        root,
        "sum",
        """
found = []
call = pb_utils.InferenceRequest(model_name="count", inputs=requests[0].inputs(),
                                 requested_output_names=["y"])
for answer in call.exec(decoupled=True):
    assert not answer.has_error(), answer.error().message()
    if answer.output_tensors():  # the final flag comes alone
        found.append(int(pb_utils.get_output_tensor_by_name(answer, "y").as_numpy()[0]))
return [y(np.array([sum(found)]))]
""",
    )
    counts = [3, 0, 100, 1]

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for count in counts:
            inputs = [given(triton, "x", np.array([count], np.int32))]
            yield {"model_name": "count", "inputs": inputs, "request_id": str(count)}

    found: dict[str, list[int]] = {str(count): [] for count in counts}
    async with start() as client:
        async for result, error in client.grpc.stream_infer(requests()):
            assert error is None
            found[result.get_response().id].append(int(result.as_numpy("y")[0]))
            if sum(map(len, found.values())) == sum(counts):
                break
        # numpy computed 64 bits where the configuration has 32; Triton accepts that, too.
        total = await client.infer("sum", x=np.array([50], np.int32))
        unary = await client.fails("count", x=one)

    assert {str(count): list(range(count)) for count in counts} == found
    assert (1225, np.int64) == (total["y"][0], total["y"].dtype)
    assert "UNIMPLEMENTED" in unary


async def test_requests_that_wait_are_executed_together_where_that_is_configured(
    start: Any, root: Path
) -> None:
    batching = "dynamic_batching { max_queue_delay_microseconds: 60000000 preferred_batch_size: 4 }"
    for name, config in (("together", batching), ("apart", "")):
        execute(
            root,
            name,
            "return [y(np.full((1, 1), len(requests), np.int32)) for _ in requests]",
            f"max_batch_size: 8 {ONE} {config}",
        )
    row = one.reshape(1, 1)
    async with start() as client:
        found = {}
        for name in ("together", "apart"):
            answers = await asyncio.gather(*(client.infer(name, x=row) for _ in range(4)))
            found[name] = [int(answer["y"][0, 0]) for answer in answers]

    assert {"together": [4] * 4, "apart": [1] * 4} == found


async def test_a_configuration_is_completed_by_the_code(start: Any, root: Path) -> None:
    model(
        root,
        "complete",
        """
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                assert config.as_dict()["name"] == "complete"
                config.add_input({"name": "x", "data_type": "TYPE_INT32", "dims": [1]})
                config.add_output({"name": "y", "data_type": "TYPE_INT32", "dims": [1]})
                config.set_max_batch_size(4)
                config.set_dynamic_batching()
                return config

            def execute(self, requests):
                return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())])
                        for r in requests]
        """,
        "",
    )
    async with start() as client:
        found: Any = await client.grpc.get_model_config("complete", as_json=True)
        outputs = await client.infer("complete", x=np.array([[5], [6]], np.int32))
        _, instance = client.server.application.registry.resolve("complete")
        runner: Any = instance.runner

    assert 4 == found["config"]["max_batch_size"]
    assert "x" == found["config"]["input"][0]["name"]
    assert [[5], [6]] == outputs["y"].tolist()
    assert runner.is_batched


async def test_a_request_has_what_the_client_said(start: Any, root: Path) -> None:
    text = 'output [{ name: "said", data_type: TYPE_STRING, dims: [ 1 ] }]'
    execute(
        root,
        "m",
        """
request, = requests
said = {"id": request.request_id(), "outputs": request.requested_output_names(),
        "sequence": request.correlation_id(), "flags": request.flags(),
        "parameters": json.loads(request.parameters()), "name": request.model_name(),
        "cancelled": request.is_cancelled(), "version": request.model_version()}
tensor = pb_utils.Tensor("said", np.array([json.dumps(said)], np.object_))
return [pb_utils.InferenceResponse([tensor])]
""",
        ONE.partition("output")[0] + text,
    )
    async with start() as client:
        result: Any = await client.grpc.infer(
            "m",
            [given(triton, "x", one)],
            request_id="my id",
            sequence_id=7,
            sequence_start=True,
            parameters={"mine": 3},
        )

    assert json.loads(result.as_numpy("said")[0]) == {
        "id": "my id",
        "outputs": ["said"],
        "sequence": 7,
        "flags": 1,
        "parameters": {"mine": 3},
        "name": "m",
        "cancelled": False,
        "version": 1,
    }


FAULTS = {
    "few": ("return []", "INTERNAL: model 'few': execute: expected a list of 1 responses, got 0"),
    "kind": ("return [3]", "expected an InferenceResponse for each request, got int"),
    "none": ("return None", "expected an InferenceResponse for each request, got NoneType"),
    "says": (
        "return [pb_utils.InferenceResponse(error=pb_utils.TritonError('no', "
        "pb_utils.TritonError.INVALID_ARG))]",
        "INVALID_ARGUMENT: model 'says': no",
    ),
    "plain": (
        "return [pb_utils.InferenceResponse(error=pb_utils.TritonError('no'))]",
        "INTERNAL: model 'plain': no",
    ),
    "lacks": (
        "return [pb_utils.InferenceResponse([pb_utils.Tensor('z', np.ones(1))])]",
        "INTERNAL: model 'lacks': expected its code to return output 'y', got 'z'",
    ),
    "floats": (
        "return [y(np.ones(1))]",
        "INTERNAL: model 'floats': output 'y' of its code: expected INT32[1], got FP64[1]",
    ),
    "large": (
        "return [y(np.array([1 << 40]))]",
        "INTERNAL: model 'large': output 'y' of its code: expected INT32[1], got INT64[1]",
    ),
    "twice": (
        "sender = requests[0].get_response_sender()\nsender.send(y(np.ones(1, np.int32)))\n"
        "return [y(np.ones(1, np.int32))]",
        "",
    ),
    "final": (
        "requests[0].get_response_sender().send(flags=1)\nreturn None",
        "INTERNAL: model 'final': it sent only the final flag",
    ),
}


async def test_what_code_does_wrong_is_an_error_that_names_the_model(
    start: Any, root: Path
) -> None:
    strict = 'parameters { key: "strict_outputs" value { string_value: "true" } }'
    for name, (body, _) in FAULTS.items():
        execute(root, name, body, ONE + strict)
    async with start() as client:
        found = {name: await client.fails(name, x=one) for name in FAULTS if name != "twice"}
        twice = await client.infer("twice", x=one)

    for name, text in found.items():
        assert FAULTS[name][1] in text
    assert [1] == twice["y"].tolist()


DROPPED = {
    "drops": ("requests[0].get_response_sender()", "its response sender was dropped"),
    "takes_none": ("pass", "execute requested no response sender"),
    "returns": ("requests[0].get_response_sender()\nreturn []", "expected None, got list"),
    "raises": ("s = requests[0].get_response_sender()\nraise ValueError('no')", "ValueError: no"),
}


async def test_a_decoupled_request_that_is_left_alone_fails(start: Any, root: Path) -> None:
    for name, (body, _) in DROPPED.items():
        execute(root, name, body, ONE + DECOUPLED)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for name in DROPPED:
            yield {"model_name": name, "inputs": [given(triton, "x", one)]}

    found = []
    async with start() as client:
        async for _, error in client.grpc.stream_infer(requests()):
            found.append(str(error))
            if len(found) == len(DROPPED):
                break

    for name, (_, expected) in DROPPED.items():
        assert any(f"model '{name}'" in text and expected in text for text in found)


async def test_metrics_and_the_log_have_what_the_code_reports(
    start: Any, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model(
        root,
        "m",
        """
        class TritonPythonModel:
            def initialize(self, args):
                self.family = pb_utils.MetricFamily(
                    name="seen_total", description="Seen", kind=pb_utils.MetricFamily.COUNTER)
                self.metric = self.family.Metric(labels={"model": "m"})

            def execute(self, requests):
                self.metric.increment(2)
                pb_utils.Logger.log_warn(f"seen {self.metric.value()}")
                return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())])
                        for r in requests]
        """,
    )
    async with start(http_endpoint="port:0") as client:
        await client.infer("m", x=one)
        shown = await client.metrics()

    assert 'seen_total{model="m"} 2\n' in shown
    assert "seen 2.0" in capsys.readouterr().out


async def test_it_is_there_for_modules_beside_it_too(start: Any, root: Path) -> None:
    write(
        root,
        "m",
        """
        from answers import answer

        class TritonPythonModel:
            def execute(self, requests):
                return [answer(request) for request in requests]
        """,
        ONE,
        {
            "answers.py": "import triton_python_backend_utils as u\n\ndef answer(request):\n"
            "    x = u.get_input_tensor_by_name(request, 'x').as_numpy()\n"
            "    return u.InferenceResponse([u.Tensor('y', x + 1)])\n"
        },
        begin=BEGIN,
    )
    async with start() as client:
        outputs = await client.infer("m", x=one)

    assert [2] == outputs["y"].tolist()


@pytest.mark.parametrize("is_async", [False, True])
def test_code_computes_for_the_first_request_that_it_is_given(is_async: bool) -> None:
    """A nested request belongs to the first request; cancelling that one cancels it."""
    done, found = threading.Event(), []

    class Plain:
        def execute(self, requests: Any) -> Any:
            found.append((current_request(), len(requests)))
            raise ValueError("no answer")

    class Async(Plain):
        async def execute(self, requests: Any) -> Any:
            return super().execute(requests)

    class Cancelled(UnsentRequest):
        is_cancelled = True

    info = ModelInfo("python", (), (), 4)
    args = {"model_name": "m", "model_version": "1"}
    copy = TritonCopy(Async() if is_async else Plain(), args, 0, info)
    left = Cancelled({}, (), failed=lambda error: None)
    asked = UnsentRequest({}, (), failed=lambda error: None)
    copy.handle([left, asked], done.set)
    assert done.wait(60)
    copy.close()

    assert [(asked, 1)] == found
