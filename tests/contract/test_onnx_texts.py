"""ONNX models whose strings are numbers, like `simple_string` in Triton's examples."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import tritonclient.grpc.aio as triton
import tritonclient.http.aio as triton_http
from onnx import TensorProto
from support.onnx_models import model, node, save
from support.server import Serve
from tritonclient.utils import InferenceServerException

STRING, INT32, FLOAT = TensorProto.STRING, TensorProto.INT32, TensorProto.FLOAT

CONFIG = """
    platform: "onnxruntime_onnx"
    max_batch_size: 4
    input [ { name: "a" data_type: TYPE_STRING dims: [ 2 ] },
            { name: "b" data_type: TYPE_STRING dims: [ 2 ] } ]
    output [ { name: "sum" data_type: TYPE_STRING dims: [ 2 ] },
             { name: "difference" data_type: TYPE_STRING dims: [ 2 ] } ]
"""


def adding(number: int = INT32) -> Any:
    """Return a model that adds and subtracts numbers in strings."""
    nodes = [
        node("Cast", ["a"], ["x"], to=number),
        node("Cast", ["b"], ["z"], to=number),
        node("Add", ["x", "z"], ["s"]),
        node("Sub", ["x", "z"], ["d"]),
        node("Cast", ["s"], ["sum"], to=STRING),
        node("Cast", ["d"], ["difference"], to=STRING),
    ]
    return model(nodes, dict.fromkeys("ab", (STRING, ("n", 2))), ["sum", "difference"])


def put(root: Path, name: str, made: Any, config: str = "") -> Path:
    (root / name / "1").mkdir(parents=True, exist_ok=True)
    (root / name / "config.pbtxt").write_text(config)
    return save(made, root / name / "1")


@pytest.fixture
async def empty(serve: Serve, tmp_path: Path) -> AsyncIterator[tuple[Path, Any, Any]]:
    """The repository of a server, and clients of both protocols."""
    root = tmp_path / "models"
    root.mkdir()
    async with (
        serve(root, http_endpoint="port:0") as server,
        triton.InferenceServerClient(server.url) as grpc_client,
        triton_http.InferenceServerClient(server.http) as http_client,
    ):
        yield root, grpc_client, http_client


async def infer(client: Any, model_name: str, a: list[Any], b: list[Any]) -> dict[str, Any]:
    module = triton if isinstance(client, triton.InferenceServerClient) else triton_http
    inputs = []
    for name, rows in (("a", a), ("b", b)):
        array = np.array(rows, np.object_)
        inputs.append(module.InferInput(name, array.shape, "BYTES"))
        inputs[-1].set_data_from_numpy(array)
    answer: Any = await client.infer(model_name, inputs)
    return {name: answer.as_numpy(name).tolist() for name in ("sum", "difference")}


async def test_texts_are_read_and_written_as_numbers(empty: tuple[Path, Any, Any]) -> None:
    root, *clients = empty
    put(root, "m", adding(), CONFIG)
    await clients[0].load_model("m")
    metadata = await clients[1].get_model_metadata("m")
    answers = [await infer(client, "m", [[b"1", b"-20"]], [[b"+3", b"004"]]) for client in clients]

    assert [{"sum": [[b"4", b"-16"]], "difference": [[b"-2", b"-24"]]}] * 2 == answers
    assert [("BYTES", [-1, 2])] * 4 == [
        (tensor["datatype"], tensor["shape"])
        for tensor in (*metadata["inputs"], *metadata["outputs"])
    ]


async def test_they_are_those_of_onnxruntime(empty: tuple[Path, Any, Any]) -> None:
    root, client, _ = empty
    path = put(root, "m", adding(FLOAT))
    await client.load_model("m")
    a = [["0.1", "1e30"], ["-7", "123456789"], ["1.5e-9", "2"]]
    b = [["0.2", "1"], ["0.33333333", "0.5"], ["0", "-2"]]
    theirs = onnxruntime.InferenceSession(path).run(
        ["sum", "difference"], {"a": np.array(a, object), "b": np.array(b, object)}
    )
    ours = await infer(client, "m", *([[t.encode() for t in row] for row in x] for x in (a, b)))

    assert [x.tolist() for x in theirs] == [
        [[t.decode() for t in row] for row in ours[name]] for name in ("sum", "difference")
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"three", "expected strings that parse as INT32, got 'three'"),
        (b"", "got ''"),
        (b"1.5", "got '1.5'"),
        (b"1_0", "got '1_0'"),
        (b"\xff", "got"),
        (b"3000000000", "got a larger one"),
        (b"1" * 5000, "got '1111"),
    ],
)
async def test_a_text_that_is_no_number_fails_its_own_request(
    empty: tuple[Path, Any, Any], text: bytes, problem: str
) -> None:
    root, client, _ = empty
    put(root, "m", adding(), CONFIG)
    await client.load_model("m")
    with pytest.raises(InferenceServerException) as caught:
        await infer(client, "m", [[b"1", text]], [[b"3", b"4"]])

    assert "StatusCode.INVALID_ARGUMENT" == caught.value.status()
    assert "model 'm', input 'a': " in str(caught.value.message())
    assert problem in str(caught.value.message())
    assert [[b"4", b"6"]] == (await infer(client, "m", [[b"1", b"2"]], [[b"3", b"4"]]))["sum"]


async def test_what_is_no_edge_is_refused(empty: tuple[Path, Any, Any]) -> None:
    root, client, _ = empty
    both = [node("Cast", ["x"], ["y"], to=INT32), node("Cast", ["x"], ["z"], to=FLOAT)]
    cases = {
        "it is read by Identity 'the_y'": ([node("Identity", ["x"], ["y"])], ["y"]),
        "it is cast to several datatypes": (both, ["y", "z"]),
    }
    for problem, (nodes, outputs) in cases.items():
        put(root, "m", model(nodes, {"x": (STRING, ("n", 2))}, outputs))
        with pytest.raises(InferenceServerException) as caught:
            await client.load_model("m")

        assert problem in str(caught.value.message())
        assert "; export the model without its text encoders" in str(caught.value.message())
    put(root, "m", adding(), CONFIG.replace("STRING", "INT32"))
    with pytest.raises(InferenceServerException, match="'a': expected BYTES as in the model"):
        await client.load_model("m")
