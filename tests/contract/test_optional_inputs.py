"""`optional` inputs through the front door: with stock clients, and as ensembles pass them on."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
import tritonclient.http.aio as triton_http
from support import asking
from support.asking import Client, given
from support.python_models import write
from support.server import Serve

import xlaserve

ROW = np.array([[1, 2]], np.float32)
DELAY = "dynamic_batching { max_queue_delay_microseconds: 200000 preferred_batch_size: [ 4 ] }"
PAIR = """
max_batch_size: 4
input [{ name: "x", data_type: TYPE_FP32, dims: [ 2 ] }]
input [{ name: "factor", data_type: TYPE_FP32, dims: [ 1 ], optional: true }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ 2 ] }]
"""
DEFAULT = 'parameters { key: "default.factor" value { string_value: "10" } }\n'
TRITONS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            factor = pb_utils.get_input_tensor_by_name(request, "factor")
            names = ["x"] if factor is None else ["x", "factor"]
            assert [tensor.name() for tensor in request.inputs()] == names
            y = -x if factor is None else x * factor.as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return answers
"""
OWN = """
class Model(PythonModel):
    batched = True

    def infer(self, inputs):
        # Every row of an execution has it, or none.
        count = len(inputs["x"]) * np.ones_like(inputs["x"])
        return {"y": inputs["x"] * inputs["factor"] + count / 8 if "factor" in inputs else -count}
"""
ENSEMBLE = """
max_batch_size: 4
input [{ name: "a", data_type: TYPE_FP32, dims: [ 2 ] }]
input [{ name: "by", data_type: TYPE_FP32, dims: [ 1 ], optional: true }]
output [{ name: "b", data_type: TYPE_FP32, dims: [ 2 ] }]
ensemble_scheduling { step [ {
    model_name: "STEP" model_version: -1
    input_map { key: "x" value: "a" }
    input_map { key: "factor" value: "by" }
    output_map { key: "y" value: "b" }
} ] }
"""


def _configure(root: Path, name: str, text: str) -> None:
    (root / name).mkdir(exist_ok=True)
    (root / name / "config.pbtxt").write_text(text)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of each kind with an input that may be left out, and ensembles of them."""
    root = tmp_path_factory.mktemp("models")
    shapes = {"x": ("FP32", [-1, 2]), "factor": ("FP32", [-1, 1])}
    for name, more in (("jax", DEFAULT), ("needs", ""), ("all", "")):
        xlaserve.export_model(
            lambda p, x, factor: {"y": x * factor}, {}, shapes, root / name / "1", max_batch_size=4
        )
        _configure(
            root, name, PAIR.replace(", optional: true", "") if name == "all" else PAIR + more
        )
    write(root, "tritons", TRITONS, PAIR + DELAY, begin="")
    write(root, "own", OWN, PAIR + DELAY)
    process = 'parameters { key: "execution" value { string_value: "process" } }'
    write(root, "process", TRITONS, PAIR + process, begin="")
    for name in ("jax", "tritons", "all"):
        _configure(root, f"of_{name}", ENSEMBLE.replace("STEP", name))
    _configure(root, "defaulted", ENSEMBLE.replace("STEP", "all") + DEFAULT.replace("factor", "by"))
    return root


@pytest.fixture
async def client(serve: Serve, repository: Path) -> AsyncIterator[Client]:
    """A client of a server of all of them that load."""
    names = ("jax", "all", "tritons", "own", "process", "of_jax", "of_tritons", "defaulted")
    settings: Any = {"load_model": names, "allow_python_models": True, "http_endpoint": "port:0"}
    async with serve(repository, **settings) as server, asking.client(server) as made:
        yield made


async def test_an_input_that_is_left_out_has_its_default_or_is_absent(client: Client) -> None:
    """In a JAX model it has the default of the configuration; the code of others sees nothing."""
    three = np.full((1, 1), 3, np.float32)
    answers = {}
    for names, x, factor, y in (
        (("jax", "tritons", "process"), "x", "factor", "y"),
        (("of_jax", "of_tritons", "defaulted"), "a", "by", "b"),
    ):
        without: dict[str, Any] = {x: ROW}
        for name in names:
            answers[name] = [
                (await client.infer(name, **asked))[y].tolist()
                for asked in (without, {**without, factor: three})
            ]
    missing = await client.fails("jax", factor=three)
    many = await client.infer("jax", x=np.ones((3, 2), np.float32))

    with_default = [[[10.0, 20.0]], [[3.0, 6.0]]]
    absent = [[[-1.0, -2.0]], [[3.0, 6.0]]]
    assert {
        "jax": with_default,
        "tritons": absent,
        "process": absent,
        "of_jax": with_default,
        "of_tritons": absent,
        "defaulted": with_default,
    } == answers
    assert "INVALID_ARGUMENT: model 'jax': expected 1 to 2 inputs but got 1, missing 'x'" == missing
    np.testing.assert_array_equal(np.full((3, 2), 10), many["y"])


@pytest.mark.slow
async def test_requests_that_leave_out_others_are_in_another_batch(client: Client) -> None:
    """Four of each come in turns: an execution has those with the input, or those without."""
    factor = np.full((1, 1), 2, np.float32)
    inputs: list[dict[str, Any]] = [{"x": ROW}, {"x": ROW, "factor": factor}]
    answers = await asyncio.gather(*(client.infer("own", **inputs[n % 2]) for n in range(8)))

    with_it = {tuple(one["y"].ravel().tolist()) for one in answers[1::2]}
    without = {tuple(one["y"].ravel().tolist()) for one in answers[::2]}
    assert {(2.5, 4.5)} == with_it
    assert {(-4.0, -4.0)} == without


async def test_both_transports_show_and_take_it(client: Client) -> None:
    http: Any
    async with triton_http.InferenceServerClient(str(client.server.http)) as http:
        config = await http.get_model_config("jax")
        result = await http.infer("jax", [given(triton_http, "x", ROW)])
        with pytest.raises(Exception, match="missing 'x'"):
            await http.infer("jax", [])
        metadata = await http.get_model_metadata("jax")
        of_code = await http.get_model_metadata("tritons")
        stream = await http.infer("tritons", [given(triton_http, "x", ROW)])
    read: Any = await client.grpc.get_model_config("jax", as_json=True)

    assert {"optional": "true", "default": "10"} == metadata["inputs"][1]["parameters"]
    assert {"optional": "true"} == of_code["inputs"][1]["parameters"]
    assert "parameters" not in metadata["inputs"][0]
    assert "parameters" not in metadata
    assert [False, True] == [bool(one.get("optional")) for one in config["input"]]
    assert [False, True] == [bool(one.get("optional")) for one in read["config"]["input"]]
    assert [[10.0, 20.0]] == result.as_numpy("y").tolist()
    assert [[-1.0, -2.0]] == stream.as_numpy("y").tolist()


@pytest.mark.slow
async def test_what_cannot_be_obeyed_fails_the_load(client: Client, repository: Path) -> None:
    """A computation takes all of its inputs, so that one that is optional needs a default."""
    texts = {}
    for text in ('"many"', "[1, 2]", "{", '{"a": 1}', "null", "[" * 5000):
        parameters = {"default.factor": {"string_value": text}}
        made = {
            "input": [
                {"name": "x", "data_type": "TYPE_FP32", "dims": [2]},
                {"name": "factor", "data_type": "TYPE_FP32", "dims": [1], "optional": True},
            ],
            "parameters": parameters,
        }
        texts[text[:8]] = await client.refused("needs", config=json.dumps(made))
    bare = await client.refused("needs")
    ensemble = await client.refused("of_all")

    expected = "input 'factor' is optional: expected its default in the parameter 'default.factor'"
    assert expected in bare
    assert (
        "input 'by' of the ensemble is optional, but step 'all' requires it for 'factor'"
        in ensemble
    )
    assert all("parameter 'default.factor': expected " in text for text in texts.values()), texts
    assert "got FP32[2]" in texts["[1, 2]"]


async def test_every_input_may_be_optional(serve: Serve, tmp_path: Path) -> None:
    """A request without inputs has one row."""
    xlaserve.export_model(
        lambda p, x, t: {"y": x + t}, {}, {"x": ("INT32", [-1, 2]), "t": ("INT32", [-1, 1])},
        tmp_path / "m" / "1", max_batch_size=4,
    )  # fmt: skip
    config = {
        "input": [
            {"name": "x", "data_type": "TYPE_INT32", "dims": [2], "optional": True},
            {"name": "t", "data_type": "TYPE_INT32", "dims": [1], "optional": True},
        ],
        "parameters": {
            "default.x": {"string_value": "[4, 5]"},
            "default.t": {"string_value": "1"},
        },
    }
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    async with serve(tmp_path, load_model=("m",)) as server, asking.client(server) as client:
        nothing = await client.infer("m")
        result: Any = await client.grpc.infer("m", [given(triton, "t", np.zeros((2, 1), np.int32))])

    assert [[5, 6]] == nothing["y"].tolist()
    assert [[4, 5], [4, 5]] == result.as_numpy("y").tolist()


async def test_an_identity_model_answers_what_a_request_has(serve: Serve, tmp_path: Path) -> None:
    """An optional input without a default may be left out, and its output is then."""

    def tensor(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "data_type": "TYPE_FP32", "dims": [1], **more}

    config = {
        "backend": "identity",
        "max_batch_size": 4,
        "input": [tensor("a", optional=True), tensor("b", optional=True)],
        "output": [tensor("x"), tensor("y")],
    }
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    (tmp_path / "models" / "m" / "config.json").write_text(json.dumps(config))
    one = np.array([[7]], np.float32)
    async with (
        serve(tmp_path / "models", load_model=("m",)) as server,
        asking.client(server) as client,
    ):
        found = [
            await (client.infer("m", a=one) if name == "a" else client.infer("m", b=one))
            for name in "abab"
        ]
        both = await client.infer("m", a=one, b=2 * one)
        only = await client.infer("m", a=one, wanted=["x"])
        refused = await client.fails("m", a=one, wanted=["y"])

    assert [{"x": 7.0}, {"y": 7.0}] * 2 == [
        {name: float(array[0, 0]) for name, array in one.items()} for one in found
    ]
    assert {"x", "y"} == both.keys()
    assert {"x"} == only.keys()
    assert refused.startswith("INVALID_ARGUMENT"), refused
