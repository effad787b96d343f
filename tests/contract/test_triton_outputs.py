"""What Triton's Python models may give and how: outputs unlike the configuration, and late ones."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from support.asking import Client, given
from support.python_models import Start, starting, write
from support.server import Serve

BEGIN = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n\n"
PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'
STRICT = 'parameters { key: "strict_outputs" value { string_value: "true" } }'
TENSORS = """
input [{ name: "x", data_type: TYPE_INT32, dims: [ 1 ] }]
output [
  { name: "y", data_type: TYPE_FP32, dims: [ 1 ] },
  { name: "text", data_type: TYPE_STRING, dims: [ 1 ] }
]
"""
FORMS: dict[str, tuple[str, str, list[int], list[Any], bool]] = {
    "as_configured": ("y", "np.ones(BATCH + [1], np.float32)", [1], [1.0], True),
    "wider": ("y", "np.full(BATCH + [1], 0.1)", [1], [0.1], False),
    "of_whole_numbers": ("y", "np.full(BATCH + [1], 7)", [1], [7], False),
    "longer": ("y", "np.ones(BATCH + [2], np.float32)", [2], [1.0, 1.0], False),
    "of_more_dimensions": ("y", "np.ones(BATCH + [1, 1], np.float32)", [1, 1], [1.0], False),
    "nothing": ("y", "np.array([])", [0], [], False),
    "text": ("text", "np.full(BATCH + [1], 'word', object)", [1], [b"word"], True),
    "number_as_text": ("text", "np.full(BATCH + [1], 3, object)", [1], [b"3"], False),
    "any_object": ("text", "np.full(BATCH + [1], None, object)", [1], [b"None"], False),
    "number_for_text": ("text", "np.full(BATCH + [1], 4, np.int32)", [1], [4], False),
    "text_for_number": ("y", "np.full(BATCH + [1], 'five')", [1], [b"five"], False),
    "big_endian": ("y", "np.ones(BATCH + [1], '>f4')", [1], [1.0], True),
    "left_out": ("z", "np.ones(1, np.float32)", [], [], False),
}
"""A form: the output, what makes it, its shape without the batch, its elements, and whether it is
what the configuration says."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def start(serve: Serve, root: Path) -> Start:
    return starting(serve, root)


def model(root: Path, name: str, code: str, config: str = TENSORS) -> None:
    write(root, name, code, config, begin=BEGIN)


def execute(root: Path, name: str, body: str, config: str = TENSORS, kind: str = "def") -> None:
    """Write a model with this body of its `execute`; `y` makes an answer."""
    lines = "\n".join("        " + line for line in body.strip("\n").splitlines())
    model(
        root,
        name,
        f"class TritonPythonModel:\n    {kind} execute(self, requests):\n{lines}\n\n"
        "def y(value):\n    tensor = pb_utils.Tensor('y', np.asarray(value))\n"
        "    return pb_utils.InferenceResponse([tensor])\n",
        config,
    )


one = np.ones(1, np.int32)


async def answered(client: Client, name: str, rows: int) -> Any:
    x = np.ones((rows, 1) if rows else 1, np.int32)
    result: Any = await client.grpc.infer(name, [given(triton, "x", x)])
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


@pytest.mark.parametrize("where", ["threads", "process"])
async def test_every_form_of_an_output_is_let_through_or_refused(
    start: Any, root: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Triton lets it through, unless the configuration has a model be strict."""
    body = "\n".join(
        f"            {form!r}: lambda BATCH: pb_utils.Tensor({name!r}, {made}),"
        for form, (name, made, *_) in FORMS.items()
    )
    code = f"""
class TritonPythonModel:
    def execute(self, requests):
        forms = {{
{body}
        }}
        answers = []
        for request in requests:
            rows = request.inputs()[0].shape()[:-1]
            made = forms[request.request_id()](rows)
            rest = {{"y": np.ones(rows + [1], np.float32),
                    "text": np.full(rows + [1], "rest", object)}}
            rest.pop(made.name(), None)
            if made.name() == "z":
                rest.pop("y")
            others = [pb_utils.Tensor(*other) for other in rest.items()]
            answers.append(pb_utils.InferenceResponse([made, *others]))
        return answers
"""
    process = PROCESS if where == "process" else ""
    for batch, strict in itertools.product((0, 4), ("", STRICT)):
        name = f"b{batch}{'strict' if strict else ''}"
        model(root, name, code, f"{TENSORS}max_batch_size: {batch}\n{strict}{process}")
    found: dict[tuple[str, int, bool], Any] = {}
    async with start() as client:
        for form, rows, strict in itertools.product(FORMS, (0, 2), (False, True)):
            x = np.ones((rows, 1) if rows else 1, np.int32)
            asked = f"b{4 if rows else 0}{'strict' if strict else ''}"
            try:
                result: Any = await client.grpc.infer(
                    asked, [given(triton, "x", x)], request_id=form
                )
            except triton.InferenceServerException as error:
                found[form, rows, strict] = str(error.message())
            else:
                outputs = result.get_response().outputs
                found[form, rows, strict] = {o.name: result.as_numpy(o.name) for o in outputs}
    log = capsys.readouterr().out

    for (form, rows, is_strict), answer in found.items():
        name, _, sizes, elements, is_right = FORMS[form]
        if is_strict and not is_right:
            assert "its code" in str(answer), (form, rows, answer)
            continue
        assert isinstance(answer, dict), (form, rows, is_strict, answer)
        rest = {"y", "text"} - {name}
        if name == "z":
            assert {"text"} == set(answer)
            continue
        assert {"y", "text"} == set(answer)
        lead = [rows] if rows and elements else []
        assert [*lead, *sizes] == list(answer[name].shape)
        wanted = elements * (rows or 1)
        assert wanted == answer[name].ravel().tolist(), (form, rows, is_strict)
        for other in rest:
            assert (rows or 1) == answer[other].size
    told = [line for line in log.splitlines() if "output mismatch with the configuration" in line]
    # Once for each output of a model.
    assert 4 == len(told)
    for line in told:
        assert "parameter 'strict_outputs' with 'true'" in line


LATE = """
import threading

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            x = request.inputs()[0].as_numpy()
            threading.Thread(
                target=self.late, args=(request.get_response_sender(), int(x[0]))).start()

    def late(self, sender, number):
        if number:
            sender.send(pb_utils.InferenceResponse(
                [pb_utils.Tensor("y", np.full(1, number, np.float32)),
                 pb_utils.Tensor("text", np.array(["late"], object))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.mark.parametrize("where", ["threads", "process"])
async def test_an_answer_may_be_sent_after_execute_has_returned(
    start: Any, root: Path, where: str
) -> None:
    model(root, "m", LATE, TENSORS + (PROCESS if where == "process" else ""))
    async with start() as client:
        asked = [client.infer("m", x=np.full(1, number, np.int32)) for number in range(1, 6)]
        found = [float(answer["y"][0]) for answer in await asyncio.gather(*asked)]
        dropped = await client.fails("m", x=np.zeros(1, np.int32))

    assert [1, 2, 3, 4, 5] == found
    assert "its response sender was dropped without the final flag" in dropped


COUNT = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = int(request.inputs()[0].as_numpy()[0])
            sender = request.get_response_sender()
            for number in range(count):
                is_last = count % 2 and number + 1 == count
                sender.send(
                    pb_utils.InferenceResponse(
                        [pb_utils.Tensor("y", np.full(1, number, np.float32))]),
                    flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0)
            if not count % 2:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CALLS = """
request, = requests
call = pb_utils.InferenceRequest(model_name="count", inputs=request.inputs(),
                                 requested_output_names=["y"])
sizes = [len(answer.output_tensors()) for answer in call.exec(decoupled=True)]
return [y(np.array(sizes, np.float32))]
"""


@pytest.mark.parametrize("where", ["threads", "process"])
async def test_the_final_flag_alone_is_an_empty_answer_of_a_call(
    start: Any, root: Path, where: str
) -> None:
    """So the examples of Triton know the end; one with outputs and the flag is followed by none."""
    model(root, "count", COUNT, TENSORS + "model_transaction_policy { decoupled: True }")
    execute(root, "calls", CALLS, TENSORS + (PROCESS if where == "process" else ""))
    async with start() as client:
        found = {
            count: (await client.infer("calls", x=np.full(1, count, np.int32)))["y"].tolist()
            for count in (0, 1, 2, 3)
        }

    assert {0: [0], 1: [1], 2: [1, 1, 0], 3: [1, 1, 1]} == found


OUTPUT = 'output [{ name: "y", data_type: TYPE_FP32, dims: [ 1 ] }]'


@pytest.mark.parametrize("where", ["threads", "process"])
async def test_a_model_may_have_no_inputs_or_no_outputs(start: Any, root: Path, where: str) -> None:
    process = PROCESS if where == "process" else ""
    nothing = "return [pb_utils.InferenceResponse([]) for _ in requests]"
    ones = "return [y(np.ones(1, np.float32)) for _ in requests]"
    rows = "return [y(np.ones((1, 1), np.float32)) for _ in requests]"
    # A process takes a second to start.
    execute(root, "no_inputs", ones, OUTPUT + process)
    execute(root, "batched", rows, OUTPUT + "max_batch_size: 4 dynamic_batching {}")
    execute(root, "no_outputs", nothing, TENSORS.partition("output")[0])
    execute(root, "gives_none", nothing)
    async with start() as client:
        found = await client.infer("no_inputs")
        row = await client.infer("batched")
        none = [await client.infer(name, x=one) for name in ("no_outputs", "gives_none")]
        metadata = await client.grpc.get_model_metadata("no_inputs")

    assert [1] == found["y"].tolist()
    assert [[1]] == row["y"].tolist()
    assert [{}, {}] == none
    assert not metadata.inputs


async def test_a_model_finds_its_devices_itself(start: Any, root: Path) -> None:
    """KIND_MODEL, as every Python model of vLLM or TensorRT-LLM has it."""
    code = """
class TritonPythonModel:
    def initialize(self, args):
        self.kind = args["model_instance_kind"]

    def execute(self, requests):
        text = pb_utils.Tensor("text", np.array([self.kind], object))
        return [pb_utils.InferenceResponse([text]) for _ in requests]
"""
    groups = {"own": "{ count: 2 kind: KIND_MODEL }", "cpu": "{ kind: KIND_CPU }"}
    for name, group in groups.items():
        model(root, name, code, TENSORS + f"instance_group [{group}]")
    async with start() as client:
        found = {name: (await client.infer(name, x=one))["text"][0] for name in groups}

    assert {"own": b"MODEL", "cpu": b"CPU"} == found


MEETS = """
import asyncio

class TritonPythonModel:
    def initialize(self, args):
        self.there = None
        self.count = 0

    async def execute(self, requests):
        self.there = self.there or asyncio.Event()
        self.count += len(requests)
        if self.count == 8:
            self.there.set()
        await self.there.wait()
        one = np.full(1, self.count, np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", one)]) for _ in requests]
"""


@pytest.mark.parametrize("where", ["threads", "process"])
async def test_coroutines_of_execute_run_side_by_side(start: Any, root: Path, where: str) -> None:
    """Each waits for all: one after the other would never end."""
    model(root, "m", MEETS, TENSORS + (PROCESS if where == "process" else ""))
    async with start() as client:
        async with asyncio.timeout(60):
            found = await asyncio.gather(*(client.infer("m", x=one) for _ in range(8)))

    assert [8.0] * 8 == [float(answer["y"][0]) for answer in found]
