"""Ensembles of steps with batches and without, decoupled ones, and absent tensors."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from support.asking import Client, given
from support.python_models import Start, starting, write
from support.server import Serve
from tritonclient.utils import InferenceServerException

BEGIN = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n\n"
ADDS = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + 1)]))
        return answers
"""
COUNTS = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            x = request.inputs()[0].as_numpy()
            for number in range(int(x.ravel()[0])):
                y = pb_utils.Tensor("y", np.full_like(x, number))
                sender.send(pb_utils.InferenceResponse([y]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DECOUPLED = "model_transaction_policy { decoupled: True }"


def tensors(dims: str, batch: int = 0, more: str = "") -> str:
    return f"""
max_batch_size: {batch}
input [{{ name: "x", data_type: TYPE_FP32, dims: {dims} {more} }}]
output [{{ name: "y", data_type: TYPE_FP32, dims: {dims} {more} }}]
"""


def step(model: str, takes: str, makes: str) -> str:
    return (
        f'step [{{ model_name: "{model}" model_version: -1 '
        f'input_map {{ key: "x" value: "{takes}" }} output_map {{ key: "y" value: "{makes}" }} }}]'
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def start(serve: Serve, root: Path) -> Start:
    return starting(serve, root)


def model(root: Path, name: str, config: str, code: str = ADDS) -> None:
    write(root, name, code, config, begin=BEGIN)


def ensemble(root: Path, name: str, config: str, *steps: str) -> None:
    (root / name / "1").mkdir(parents=True)
    chain = "".join(steps)
    text = f'platform: "ensemble"\n{config}\nensemble_scheduling {{ {chain} }}'
    (root / name / "config.pbtxt").write_text(text)


KINDS = ("flat", "rows")
"""Models without batches, and of batches of 4 rows."""


async def test_steps_with_batches_and_without_are_joined_by_batches_of_one(
    start: Any, root: Path
) -> None:
    """Triton puts one in front of what has none, and takes it away again: in every order."""
    model(root, "flat", tensors("[ 3 ]"))
    model(root, "rows", tensors("[ 3 ]", 4))
    chains = [(whole, *steps) for whole in KINDS for steps in itertools.product(KINDS, repeat=2)]
    for whole, a, b in chains:
        config = tensors("[ 3 ]", 4 if whole == "rows" else 0)
        ensemble(root, f"{whole}_{a}_{b}", config, step(a, "x", "t"), step(b, "t", "y"))
    x = np.arange(3, dtype=np.float32)
    found = {}
    async with start() as client:
        for whole, *steps in chains:
            name = "_".join((whole, *steps))
            given_rows = x[None] if whole == "rows" else x
            found[name] = (await client.infer(name, x=given_rows))["y"]
        several = await client.fails("rows_rows_flat", x=np.ones((2, 3), np.float32))
        plain = await client.infer("rows_rows_rows", x=np.ones((2, 3), np.float32))

    for name, y in found.items():
        wanted = x + 2
        assert (wanted[None] if name.startswith("rows") else wanted).tolist() == y.tolist(), name
    assert several == (
        "INVALID_ARGUMENT: model 'flat', input 'x': expected a batch of 1 row, since models with"
        " and without batches are combined, got 2 rows"
    )
    assert (2, 3) == plain["y"].shape


async def test_an_ensemble_may_reshape_what_its_clients_send(start: Any, root: Path) -> None:
    model(root, "six", tensors("[ 6 ]"))
    model(root, "six_rows", tensors("[ 6 ]", 4))
    reshape = "reshape { shape: [ 6 ] }"
    for name, batch in (("six", 0), ("six_rows", 4)):
        config = tensors("[ 2, 3 ]", batch, reshape)
        ensemble(root, f"of_{name}", config, step(name, "x", "t"), step(name, "t", "y"))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    async with start() as client:
        one = await client.infer("of_six", x=x)
        rows = await client.infer("of_six_rows", x=np.stack([x, x]))
        metadata = await client.grpc.get_model_metadata("of_six")

    assert (x + 2).tolist() == one["y"].tolist()
    assert [(x + 2).tolist()] * 2 == rows["y"].tolist()
    assert [2, 3] == list(metadata.inputs[0].shape)


async def streamed(client: Client, name: str, **inputs: Any) -> list[Any]:
    """Return the answers of a request of a stream, and the error that ends them."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        tensors = [given(triton, *one) for one in inputs.items()]
        yield {"model_name": name, "inputs": tensors, "enable_empty_final_response": True}

    found: list[Any] = []
    async with asyncio.timeout(60):
        answers: Any = client.grpc.stream_infer(requests())
        async for result, error in answers:
            if error is not None:
                return [*found, str(error.message())]
            response = result.get_response()
            if response.outputs:
                found.append(result.as_numpy("y").tolist())
            if response.parameters["triton_final_response"].bool_param:
                break
    return found


async def test_steps_behind_a_decoupled_one_answer_for_each_of_its_answers(
    start: Any, root: Path
) -> None:
    model(root, "counts", tensors("[ 1 ]") + DECOUPLED, COUNTS)
    model(root, "adds", tensors("[ 1 ]"))
    chain = step("adds", "x", "n"), step("counts", "n", "t"), step("adds", "t", "y")
    ensemble(root, "each", tensors("[ 1 ]"), *chain)
    ensemble(root, "said", tensors("[ 1 ]") + DECOUPLED, *chain)
    twice = step("counts", "x", "t"), step("counts", "t", "y")
    ensemble(root, "twice", tensors("[ 1 ]"), *twice)
    async with start() as client:
        found = {
            (name, count): await streamed(client, name, x=np.full(1, count, np.float32))
            for name, count in (("each", 2), ("each", 40), ("said", 1), ("each", -1), ("twice", 4))
        }
        unary = await client.fails("each", x=np.ones(1, np.float32))
        config: Any = await client.grpc.get_model_config("each", as_json=True)

    assert [[1], [2], [3]] == found["each", 2]
    assert [[number] for number in range(1, 42)] == found["each", 40]
    assert [[1], [2]] == found["said", 1]
    assert [] == found["each", -1]
    # 0, 1, 2 and 3 answers.
    assert [[0], [0], [1], [0], [1], [2]] == found["twice", 4]
    assert "UNIMPLEMENTED" in unary
    assert config["config"]["model_transaction_policy"]["decoupled"]


async def test_an_ensemble_without_decoupled_steps_cannot_be_decoupled(
    start: Any, root: Path
) -> None:
    model(root, "adds", tensors("[ 1 ]"))
    ensemble(root, "said", tensors("[ 1 ]") + DECOUPLED, step("adds", "x", "y"))
    async with start("adds", model_control_mode="explicit") as client:
        refused = await client.refused("said")

    assert (
        "model_transaction_policy.decoupled: expected false, since every step returns one"
        in refused
    )


TWO = """
input [
  { name: "a", data_type: TYPE_FP32, dims: [ 1 ] optional: true },
  { name: "b", data_type: TYPE_FP32, dims: [ 1 ] optional: true }
]
output [
  { name: "c", data_type: TYPE_FP32, dims: [ 1 ] },
  { name: "d", data_type: TYPE_FP32, dims: [ 1 ] }
]
"""


def joined(model_name: str, takes: tuple[str, str], makes: tuple[str, str]) -> str:
    maps = "".join(
        f'input_map {{ key: "{name}" value: "{tensor}" }}'
        for name, tensor in zip("ab", takes, strict=True)
    ) + "".join(
        f'output_map {{ key: "{name}" value: "{tensor}" }}'
        for name, tensor in zip("cd", makes, strict=True)
    )
    return f'step [{{ model_name: "{model_name}" model_version: -1 {maps} }}]'


async def test_a_tensor_between_steps_may_be_absent(start: Any, root: Path) -> None:
    """The next step takes it as an optional input that is left out, or the request fails."""
    gives = """
class TritonPythonModel:
    def execute(self, requests):
        names = {"a": "c", "b": "d"}
        return [pb_utils.InferenceResponse([
            pb_utils.Tensor(names[one.name()], one.as_numpy() + 1) for one in request.inputs()
        ]) for request in requests]
"""
    for name, begin, code in (("same", 'backend: "identity"\n', ""), ("adds", "", gives)):
        model(root, name, TWO, code or gives)
        if begin:
            (root / name / "1" / "model.py").unlink()
            (root / name / "config.pbtxt").write_text(begin + TWO)
    model(root, "needs", TWO.replace(" optional: true", ""), gives)
    for first, second in itertools.product(("same", "adds"), ("same", "adds", "needs")):
        chain = joined(first, ("a", "b"), ("t", "u")), joined(second, ("t", "u"), ("c", "d"))
        ensemble(root, f"{first}_{second}", TWO, *chain)
    one = np.ones(1, np.float32)
    found: dict[tuple[str, str], Any] = {}
    async with start() as client:
        for first, second in itertools.product(("same", "adds"), ("same", "adds", "needs")):
            name = f"{first}_{second}"
            for inputs in ({"a": one}, {"b": one}, {"a": one, "b": one}):
                try:
                    outputs = await client.infer(name, **inputs)
                except InferenceServerException as error:
                    found[name, "".join(inputs)] = str(error.message())
                else:
                    found[name, "".join(inputs)] = {n: v.tolist() for n, v in outputs.items()}

    for (name, asked), answer in found.items():
        if name.endswith("needs") and len(asked) == 1:
            missing = "b" if asked == "a" else "a"
            assert f"model 'needs': expected 2 inputs but got 1, missing '{missing}'" in answer
            continue
        sum_ = [1.0 + name.count("adds") + name.count("needs")]
        assert {"cd"["ab".index(one)]: sum_ for one in asked} == answer, (name, asked)


async def test_what_a_step_gives_unlike_its_configuration_is_checked_for_the_next(
    start: Any, root: Path
) -> None:
    wide = ADDS.replace('"y", x + 1', '"y", x.astype(np.float64)')
    model(root, "wide", tensors("[ 1 ]"), wide)
    model(root, "adds", tensors("[ 1 ]"))
    ensemble(root, "fails", tensors("[ 1 ]"), step("wide", "x", "t"), step("adds", "t", "y"))
    ensemble(root, "passes", tensors("[ 1 ]"), step("adds", "x", "t"), step("wide", "t", "y"))
    one = np.ones(1, np.float32)
    async with start() as client:
        fails = await client.fails("fails", x=one)
        passes = await client.infer("passes", x=one)

    assert "INVALID_ARGUMENT: model 'adds', input 'x': expected FP32[1], got FP64[1]" == fails
    assert (np.float64, [2]) == (passes["y"].dtype, passes["y"].tolist())
