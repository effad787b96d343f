"""Models like those of Triton's example repository, served unchanged.

Rewritten here: equivalent graphs and configurations, with the stock client.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

pytest.importorskip("onnx", reason="onnx is not installed")

import tritonclient.grpc.aio as triton
import tritonclient.http.aio as triton_http
from onnx import TensorProto
from support.onnx_models import Inputs, model, node, save
from support.server import serving
from tritonclient.utils import InferenceServerException

FLOAT, INT8, INT32 = TensorProto.FLOAT, TensorProto.INT8, TensorProto.INT32

pytestmark = pytest.mark.asyncio(loop_scope="module")


def tensors(kind: str, names: str, datatype: str, dims: str) -> str:
    parts = (f'{{ name: "{name}" data_type: {datatype} dims: [ {dims} ] }}' for name in names)
    return f"{kind} [ {', '.join(parts)} ]\n"


def both(datatype: str, dims: str = "4") -> str:
    return tensors("input", "ab", datatype, dims) + tensors("output", "sd", datatype, dims)


def control(name: str, kind: str) -> str:
    return (
        f'control_input [ {{ name: "{name}" control [ '
        f"{{ kind: CONTROL_SEQUENCE_{kind} int32_false_true: [ 0, 1 ] }} ] }} ]\n"
    )


RESHAPED = """
    input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, 2 ] reshape { shape: [ 1, 3, 2 ] } } ]
    output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] reshape { shape: [ 1, 3, 1 ] } } ]
"""


def models() -> dict[str, tuple[Any, str]]:
    """Return graphs and configurations by name."""
    plain = [node("Add", ["a", "b"], ["s"]), node("Sub", ["a", "b"], ["d"])]
    narrow = [
        *(node("Cast", [name], [f"{name}32"], to=INT32) for name in "ab"),
        *(node("Add", ["a32", "b32"], ["s32"]), node("Sub", ["a32", "b32"], ["d32"])),
        *(node("Cast", [f"{name}32"], [name], to=INT8) for name in "sd"),
    ]
    sequence = [node("Add", ["x", "START"], ["added"]), node("Mul", ["READY", "added"], ["y"])]
    pooled = [node("ReduceSum", ["x", "axes"], ["y"], keepdims=1)]
    axes = {"axes": np.array([2])}
    onnx = 'platform: "onnxruntime_onnx"\n'
    batched = f"{onnx} max_batch_size: 8\n"
    one = tensors("input", "x", "TYPE_INT32", "1") + tensors("output", "y", "TYPE_INT32", "1")
    controls = control("START", "START") + control("READY", "READY")
    of_sequence: Inputs = dict.fromkeys(("x", "START", "READY"), (INT32, ("n", 1)))
    rows = ("n", 4)
    return {
        "simple": (
            model(plain, dict.fromkeys("ab", (INT32, rows)), ["s", "d"]),
            batched + both("TYPE_INT32"),
        ),
        "simple_int8": (
            model(narrow, dict.fromkeys("ab", (INT8, rows)), ["s", "d"]),
            batched + both("TYPE_INT8"),
        ),
        "simple_sequence": (
            model(sequence, of_sequence, ["y"]),
            f"{batched} {one} sequence_batching {{ {controls} }} "
            "instance_group { kind: KIND_CPU }",
        ),
        "densenet": (
            model(pooled, {"x": (FLOAT, (1, 3, 2))}, ["y"], axes),
            f"{onnx} max_batch_size: 0 {RESHAPED}",
        ),
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Any, Any]]:
    """Clients of both protocols for a server with all models."""
    root = tmp_path_factory.mktemp("models")
    for name, (made, config) in models().items():
        (root / name / "1").mkdir(parents=True)
        save(made, root / name / "1")
        (root / name / "config.pbtxt").write_text(f'name: "{name}"\n{config}')
    identity = 'backend: "identity" max_batch_size: 8\n'
    text = tensors("input", "x", "TYPE_STRING", "-1") + tensors("output", "y", "TYPE_STRING", "-1")
    (root / "simple_identity/1").mkdir(parents=True)
    (root / "simple_identity/config.pbtxt").write_text(identity + text)
    scratch: Path = tmp_path_factory.mktemp("scratch")
    async with (
        serving(scratch, root, load_model=("*",), http_endpoint="port:0") as server,
        triton.InferenceServerClient(server.url) as grpc_client,
        triton_http.InferenceServerClient(server.http) as http_client,
    ):
        yield grpc_client, http_client


async def infer(client: Any, name: str, arrays: dict[str, Any], **more: Any) -> dict[str, Any]:
    module: Any = triton if isinstance(client, triton.InferenceServerClient) else triton_http
    kinds = {"int32": "INT32", "int8": "INT8", "float32": "FP32", "object": "BYTES"}
    inputs = []
    for tensor, array in arrays.items():
        inputs.append(module.InferInput(tensor, array.shape, kinds[array.dtype.name]))
        inputs[-1].set_data_from_numpy(array)
    answer: Any = await client.infer(name, inputs, **more)
    outputs = [*await _outputs(client, name)]
    return {output: answer.as_numpy(output) for output in outputs}


async def _outputs(client: Any, name: str) -> list[str]:
    described: Any = await client.get_model_metadata(name)
    listed = described["outputs"] if isinstance(described, dict) else described.outputs
    return [row["name"] if isinstance(row, dict) else row.name for row in listed]


@pytest.mark.parametrize(("name", "dtype"), [("simple", np.int32), ("simple_int8", np.int8)])
async def test_sums_and_differences(clients: tuple[Any, Any], name: str, dtype: Any) -> None:
    a, b = np.array([[100, 2, 3, 4]], dtype), np.array([[27, 1, 1, 9]], dtype)
    for client in clients:
        found = await infer(client, name, {"a": a, "b": b})

        assert [[127, 3, 4, 13]] == found["s"].tolist()
        assert [[73, 1, 2, -5]] == found["d"].tolist()
        assert dtype == found["s"].dtype


async def test_texts_come_back(clients: tuple[Any, Any]) -> None:
    sent = np.array([[b"a", b"", b"\xff\x00"]], object)
    for client in clients:
        assert sent.tolist() == (await infer(client, "simple_identity", {"x": sent}))["y"].tolist()


async def test_a_sequence_is_told_its_start(clients: tuple[Any, Any]) -> None:
    for number, client in enumerate(clients, 1):
        found = []
        for step, value in enumerate((11, 7, 5)):
            answer = await infer(
                client,
                "simple_sequence",
                {"x": np.array([[value]], np.int32)},
                sequence_id=number,
                sequence_start=step == 0,
                sequence_end=step == 2,
            )
            found.append(int(answer["y"][0, 0]))

        assert [12, 7, 5] == found


async def test_tensors_are_reshaped_for_a_model_of_fixed_shape(clients: tuple[Any, Any]) -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    for client in clients:
        assert [1, 5, 9] == (await infer(client, "densenet", {"x": x}))["y"].tolist()


@pytest.mark.parametrize("parameter", ["file:{}", "file:1/{}", "file:{}/model.onnx"])
async def test_a_file_name_that_no_file_system_takes_is_not_found_in_the_repository(
    clients: tuple[Any, Any], parameter: str
) -> None:
    """Triton answers INTERNAL: its example simple_grpc_model_control checks status and text."""
    grpc_client, http_client = clients
    files = {parameter.format("A" * 256): b"a"}
    with pytest.raises(InferenceServerException) as over_grpc:
        await grpc_client.load_model("simple", config="{}", files=files)
    with pytest.raises(InferenceServerException) as over_http:
        await http_client.load_model("simple", config="{}", files=files)

    assert "StatusCode.INTERNAL" == over_grpc.value.status()
    assert "400" in str(over_http.value.status())
    for raised in (over_grpc, over_http):
        text = str(raised.value.message())
        assert "failed to load 'simple', failed to poll from model repository: file 'A" in text
        assert "expected a name of at most 255 bytes, got 256" in text
        assert len(text) < 500
    assert await grpc_client.is_model_ready("simple")
