"""All that Triton documents for a model.py, as its users write it, in threads and processes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
import tritonclient.http.aio as triton_http
from support.asking import given
from support.python_models import VECTORS, Start, starting, write
from support.server import Serve

PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'
SAYS = """
input [{ name: "x", data_type: TYPE_FP32, dims: [ -1 ] }]
output [{ name: "said", data_type: TYPE_STRING, dims: [ 1 ] }]
"""
BEGIN = """
import json
import os
import numpy as np
import triton_python_backend_utils as pb_utils

def answer(said):
    tensor = pb_utils.Tensor("said", np.array([json.dumps(said)], np.object_))
    return pb_utils.InferenceResponse(output_tensors=[tensor])
"""
ALL = """
class TritonPythonModel:
    def initialize(self, args):
        self.args = {name: args[name] for name in (
            "model_instance_kind", "model_instance_device_id", "model_instance_name",
            "model_name", "model_version")}
        self.config = json.loads(args["model_config"])
        self.repository = args["model_repository"]
        with open(os.path.join(pb_utils.get_model_dir(), "engine.json")) as file:
            self.engine = json.load(file)
        family = pb_utils.MetricFamily(
            name="seen_sizes", description="Sizes", kind=pb_utils.MetricFamily.HISTOGRAM)
        self.sizes = family.Metric(labels={"model": "all"}, buckets=[1, 10])
        gauge = pb_utils.MetricFamily(
            name="seen_last", description="Last", kind=pb_utils.MetricKind.GAUGE)
        self.last = gauge.Metric(labels={"model": "all"})

    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            self.sizes.observe(x.as_numpy().size)
            self.last.set(x.as_numpy().size)
            pb_utils.Logger.log("plain words")
            pb_utils.Logger.log("loud words", pb_utils.Logger.ERROR)
            pb_utils.Logger.log_info(message="more words")
            pb_utils.Logger.log_verbose("many words")
            call = pb_utils.InferenceRequest(
                model_name="inner", requested_output_names=["y"], inputs=[x],
                request_id="mine", correlation_id=0, model_version=1, flags=0, timeout=50_000_000,
                preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
                trace=request.trace(), parameters={"by": 3})
            found = call.exec()
            if found.has_error():
                raise pb_utils.TritonModelException(found.error().message())
            late = pb_utils.InferenceRequest(
                model_name="inner", requested_output_names=["y"], inputs=[x],
                timeout=1, parameters={"wait": True}).exec()
            y = pb_utils.get_output_tensor_by_name(found, "y")
            taken = pb_utils.Tensor.from_dlpack("t", y)
            raw = pb_utils.serialize_byte_tensor(np.array([b"a", "bc"], np.object_))
            answers.append(answer({
                "args": self.args, "engine": self.engine,
                "repository": os.path.basename(self.repository),
                "id": request.request_id(), "timeout": request.timeout(),
                "parameters": json.loads(request.parameters()),
                "flags": request.flags(), "correlation": request.correlation_id(),
                "context": request.trace().get_context(),
                "cancelled": [request.is_cancelled(), request.get_response_sender().is_cancelled()],
                "y": y.as_numpy().tolist(), "late": late.has_error(),
                "taken": [taken.name(), taken.shape(), taken.is_cpu(), taken.triton_dtype()],
                "back": [t.decode() for t in pb_utils.deserialize_bytes_tensor(raw)],
                "no": [pb_utils.get_input_tensor_by_name(request, "z"),
                       pb_utils.get_input_config_by_name(self.config, "z")],
                "config": pb_utils.get_input_config_by_name(self.config, "x")["dims"],
                "numpy": str(np.dtype(pb_utils.triton_string_to_numpy("TYPE_FP16"))),
                "decoupled": pb_utils.using_decoupled_model_transaction_policy(self.config),
                "sender": None,
            }))
        # A response sender that was asked for need not be used.
        return [None if one is None else one for one in answers]
"""
INNER = """
import time

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            given = json.loads(request.parameters())
            while given.get("wait") and not request.is_cancelled():
                time.sleep(0.01)
            y = request.inputs()[0].as_numpy() + given.get("by", 0)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return answers
"""
CODES = """
class TritonPythonModel:
    def execute(self, requests):
        name = json.loads(requests[0].parameters())["code"]
        error = pb_utils.TritonError("An Error Occurred", getattr(pb_utils.TritonError, name))
        return [pb_utils.InferenceResponse(error=error)]
"""
STATUSES = {
    "UNKNOWN": "UNKNOWN",
    "INTERNAL": "INTERNAL",
    "NOT_FOUND": "FAILED_PRECONDITION",
    "INVALID_ARG": "INVALID_ARGUMENT",
    "UNAVAILABLE": "UNAVAILABLE",
    "UNSUPPORTED": "UNIMPLEMENTED",
    "ALREADY_EXISTS": "ALREADY_EXISTS",
    "CANCELLED": "CANCELLED",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def start(serve: Serve, root: Path) -> Start:
    return starting(serve, root)


x = np.ones(3, np.float32)


@pytest.mark.parametrize("where", ["threads", "process"])
async def test_the_whole_interface_is_there(
    start: Any, root: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = PROCESS if where == "process" else ""
    write(root, "all", ALL, SAYS + more, {"engine.json": '{"width": 4}'}, BEGIN)
    write(root, "inner", INNER, VECTORS, {}, BEGIN)
    async with start(http_endpoint="port:0") as client:
        answer: Any = await client.grpc.infer(
            "all",
            [given(triton, "x", x)],
            request_id="an id",
            timeout=60_000_000,
            parameters={"mine": "word"},
        )
        async with asyncio.timeout(60):
            while "seen_last" not in (metrics := await client.metrics()):
                await asyncio.sleep(0.01)
    said = json.loads(answer.as_numpy("said")[0])
    log = capsys.readouterr().out

    assert said == {
        "args": {
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
            "model_instance_name": "all_0",
            "model_name": "all",
            "model_version": "1",
        },
        "engine": {"width": 4},
        "repository": "all",
        "id": "an id",
        "timeout": 60_000_000,
        "parameters": {"mine": "word"},
        "flags": 0,
        "correlation": 0,
        "context": None,
        "cancelled": [False, False],
        "y": [4, 4, 4],
        "late": True,
        "taken": ["t", [3], True, 11],
        "back": ["a", "bc"],
        "no": [None, None],
        "config": [-1],
        "numpy": "float16",
        "decoupled": False,
        "sender": None,
    }
    assert 'seen_sizes_bucket{model="all",le="1"} 0\n' in metrics
    assert 'seen_sizes_bucket{model="all",le="10"} 1\n' in metrics
    assert 'seen_last{model="all"} 3\n' in metrics
    for level, words in (("info", "plain"), ("error", "loud"), ("info", "more"), ("debug", "many")):
        assert f"[{level:9}] {words} words" in log


async def test_errors_have_the_status_of_their_code(start: Any, root: Path) -> None:
    write(root, "m", CODES, SAYS, {}, BEGIN)
    async with start() as client:
        found = {name: await client.fails("m", x=x, parameters={"code": name}) for name in STATUSES}

    for name, status in STATUSES.items():
        assert f"{status}: model 'm': An Error Occurred" == found[name]


@pytest.mark.slow
async def test_what_is_not_obeyed_is_refused_or_named(
    start: Any, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "e.tar.gz" } }'
    write(root, "environment", CODES, SAYS + environment, {}, BEGIN)
    write(
        root,
        "ready",
        CODES + "\n    def is_ready(self):\n        return False\n",
        SAYS + PROCESS,
        {},
        BEGIN,
    )
    async with start(load="ready") as client:
        text = await client.refused("environment")
        is_ready = await client.grpc.is_model_ready("ready")

    assert is_ready
    assert "failed to load 'environment', parameter 'EXECUTION_ENV_PATH'" in text
    assert "is_ready ignored: a model in a process is ready once loaded" in capsys.readouterr().out


READY = {
    "yes": "def is_ready(self):\n        return True",
    "no": "def is_ready(self):\n        return False",
    "later": "async def is_ready(self):\n        return os.path.exists(os.environ['PATH_OF_TEST'])",
    "fails": "def is_ready(self):\n        raise ValueError('no')",
    "odd": "def is_ready(self):\n        return 1",
}


async def test_a_model_is_ready_where_its_code_says_so(
    start: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, code in READY.items():
        write(root, name, f"{CODES}\n    {code}\n", SAYS, {}, BEGIN)
    monkeypatch.setenv("PATH_OF_TEST", str(root / "there"))
    async with start(http_endpoint="port:0") as client:
        async with triton_http.InferenceServerClient(client.server.http) as over_http:
            asked = {name: await client.grpc.is_model_ready(name) for name in READY}
            by_http = {name: await over_http.is_model_ready(name, "1") for name in READY}
            (root / "there").touch()
            later = await client.grpc.is_model_ready("later")
        answered = await client.fails(
            "no", x=np.zeros(1, np.float32), parameters={"code": "UNKNOWN"}
        )

    assert {name: name == "yes" for name in READY} == asked == by_http
    assert later
    assert "An Error Occurred" in answered
