"""Iterative sequences: a request is executed until the code of its model says that it is done."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from support import asking, sequence_models
from support.asking import Client, given
from support.python_models import write
from support.server import Serve
from tritonclient.utils import InferenceServerException

CONFIG = """
max_batch_size: 4
input [{ name: "x", data_type: TYPE_INT32, dims: [ 1 ] }]
output [{ name: "y", data_type: TYPE_INT32, dims: [ 2 ] }]
instance_group [{ count: 1 kind: KIND_CPU }]
sequence_batching {
  iterative_sequence: true
  oldest { max_candidate_sequences: SLOTS }
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 } ] }
  ]
}
"""
PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'
DECOUPLED = "model_transaction_policy { decoupled: true }"
BEGIN = """
import numpy as np
import triton_python_backend_utils as pb_utils

def told(request, name):
    return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0, 0])

def shown(count, most):
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[count, most]], np.int32))])

AGAIN = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
"""
COUNT = """
class TritonPythonModel:
    def initialize(self, args):
        self.counts, self.most = {}, 0

    def execute(self, requests):
        self.most = max(self.most, len(requests))
        answers = []
        for request in requests:
            id = request.correlation_id()
            assert id == told(request, "CORRID") and id
            is_start = id not in self.counts
            assert is_start == bool(told(request, "START")) == bool(request.flags() & 1)
            self.counts[id] = self.counts.get(id, 0) + 1
            x = told(request, "x")
            if x < 0:
                raise ValueError("it cannot be counted")
            if self.counts[id] < x:
                request.set_release_flags(AGAIN)
                answers.append(None)
            else:
                answers.append(shown(self.counts.pop(id), self.most))
        return answers
"""
SEND = """
class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            id, sender = request.correlation_id(), request.get_response_sender()
            left = self.left.get(id, told(request, "x")) - 1
            self.left[id] = left
            if left:
                sender.send(shown(left, len(self.left)))
                request.set_release_flags(AGAIN)
            else:
                sender.send(shown(left, len(self.left)), flags=1)
                del self.left[id]
"""
IDLE = "max_sequence_idle_microseconds: 600000000"
HOLD = """
import time
from pathlib import Path

ROOT = Path(PLACE)

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            if told(request, "x"):
                (ROOT / f"step-{request.correlation_id()}").touch()
                request.set_release_flags(AGAIN)
                answers.append(None)
                continue
            (ROOT / "begun").touch()
            while not (ROOT / "gate").exists():
                time.sleep(0.005)
            answers.append(shown(7, 7))
        return answers
"""
WRONG = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            request.set_release_flags(AGAIN)
        return [shown(1, 1) for request in requests]
"""
OWN = """
class Model(PythonModel):
    def infer(self, inputs):
        return {"y": inputs["x"]}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    many, two = CONFIG.replace("SLOTS", "64"), CONFIG.replace("SLOTS", "2")
    two = two.replace("sequence_batching {", "sequence_batching {\n" + IDLE)
    two = two.replace("max_batch_size: 4", "max_batch_size: 1")
    write(root, "count", COUNT, many, begin=BEGIN)
    write(root, "process", COUNT, many + PROCESS, begin=BEGIN)
    write(root, "send", SEND, many + DECOUPLED, begin=BEGIN)
    write(root, "send_process", SEND, many + DECOUPLED + PROCESS, begin=BEGIN)
    held = HOLD.replace("PLACE", repr(str(root)))
    write(root, "hold", held, two, begin=BEGIN)
    write(root, "wrong", WRONG, many, begin=BEGIN)
    write(root, "once", WRONG, many.replace("iterative_sequence: true", ""), begin=BEGIN)
    write(root, "own", OWN, many)
    sequence_models.export_fold(root)
    sequence_models.configure(root, strategy="iterative_sequence: true")
    return root


@pytest.fixture
def models() -> tuple[str, ...]:
    """Those that are loaded."""
    return ("count", "hold", "wrong", "once")


@pytest.fixture
async def client(serve: Serve, repository: Path, models: tuple[str, ...]) -> AsyncIterator[Client]:
    settings: Any = {"load_model": models, "allow_python_models": True}
    async with serve(repository, **settings) as server, asking.client(server) as made:
        yield made


def x(value: int) -> "np.ndarray[Any, Any]":
    return np.full((1, 1), value, np.int32)


async def _answers(client: Client, model: str, value: int) -> list[int]:
    """Return what is left after each answer."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": [given(triton, "x", x(value))]}
        await asyncio.Event().wait()  # the stream stays open

    found = []
    stream: Any = client.grpc.stream_infer(requests())
    async for result, error in stream:
        assert error is None
        found.append(int(result.as_numpy("y")[0, 0]))
        if not found[-1]:
            break
    stream.cancel()
    return found


@pytest.mark.parametrize("models", [("count",), pytest.param(("process",), marks=pytest.mark.slow)])
async def test_a_request_is_executed_until_its_model_is_done(
    client: Client, models: tuple[str, ...]
) -> None:
    """Requests at different steps share executions; START is told with the first one alone."""
    counts = [1, 40, 2, 41, 40, 3]
    found = await asyncio.gather(*(client.infer(models[0], x=x(count)) for count in counts))

    assert counts == [int(one["y"][0, 0]) for one in found]
    assert 1 < max(int(one["y"][0, 1]) for one in found) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("models", [("send",), ("send_process",)])
async def test_a_decoupled_one_answers_with_each_step(
    client: Client, models: tuple[str, ...]
) -> None:
    (model,) = models
    found = await asyncio.gather(*(_answers(client, model, count) for count in (5, 1, 3)))

    metadata: Any = await client.grpc.get_model_metadata(model)

    assert [[4, 3, 2, 1, 0], [0], [2, 1, 0]] == found
    assert b"decoupled" in metadata.SerializeToString()
    assert "UNIMPLEMENTED" in await client.fails(model, x=x(2))


async def test_a_sequence_ends_with_its_request(client: Client, repository: Path) -> None:
    """Who leaves while it waits for its next step gives its slot to another: there are two."""
    begun, gate = repository / "begun", repository / "gate"
    running = await _endless(client, repository)
    holding = asyncio.ensure_future(client.infer("hold", x=x(0)))
    while not (begun.exists() or holding.done()):
        await asyncio.sleep(0.01)
    # The copy executes the other one, so that this one waits.
    _, instance = client.server.application.registry.resolve("hold")
    waits = instance.pending
    running.cancel()
    while instance.pending != 0:
        await asyncio.sleep(0.01)
    gate.touch()
    held = await holding
    both = [await asyncio.wait_for(_endless(client, repository), 20) for _ in range(2)]
    for stream in both:
        stream.cancel()

    assert waits == 1
    assert [[7, 7]] == held["y"].tolist()


async def _endless(client: Client, repository: Path) -> Any:
    """Return a request that goes on and on, whose first execution has begun."""
    before = len(_executed(repository))
    asked = asyncio.ensure_future(client.infer("hold", x=x(1)))
    while len(_executed(repository)) == before and not asked.done():
        await asyncio.sleep(0.01)
    return asked


def _executed(repository: Path) -> list[Path]:
    """Return a file for each endless request that was executed."""
    return list(repository.glob("step-*"))


async def test_what_fails_is_told_and_others_go_on(client: Client) -> None:
    wrong = await client.fails("wrong", x=x(1))
    one = given(triton, "x", x(1))
    with pytest.raises(InferenceServerException, match="iterative_sequence: true"):
        await client.grpc.infer("once", [one], sequence_id=1, sequence_start=True)
    failed = await client.fails("count", x=x(-1))
    after = await client.infer("count", x=x(3))

    assert "execute: expected None for a rescheduled request, got a response" in wrong
    assert "it cannot be counted" in failed
    assert 3 == after["y"][0, 0]


async def test_what_cannot_say_that_it_goes_on_fails_the_load(client: Client) -> None:
    assert "expected a TritonPythonModel" in await client.refused("own")
    assert "only available for Python models; export a JAX model with export_stream instead" in (
        await client.refused("fold")
    )
