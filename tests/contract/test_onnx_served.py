"""Well-known networks imported from ONNX and served in batches, compared to onnxruntime."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from onnx import helper
from support import onnx_networks as networks
from support.onnx_models import (
    BOOL,
    FLOAT,
    INT64,
    Inputs,
    largest_difference,
    model,
    node,
    save,
    theirs,
)
from support.server import Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from xlaserve.importers.onnx.importing import Options, import_model
from xlaserve.tensors import Tensor, datatype_of

TOLERANCE = 1e-4
CLIENTS = 12
PATIENT = {"max_queue_delay_microseconds": 200_000}

Make = Callable[[int], dict[str, Tensor]]


def pixels(size: int) -> Make:
    def make(number: int) -> dict[str, Tensor]:
        random = np.random.default_rng(number)
        return {"image": random.standard_normal((1, 3, size, size), np.float32)}

    return make


def tokens(words: int, length: int) -> Make:
    def make(number: int) -> dict[str, Tensor]:
        random = np.random.default_rng(number)
        mask = (np.arange(length)[None] <= random.integers(1, length)).astype(np.int64)
        return {"input_ids": random.integers(0, words, (1, length)), "attention_mask": mask}

    return make


def repeated() -> Any:
    """Return a Scan over time whose state passes through a Loop with many iterations."""
    scanned = helper.make_graph(
        [
            node("Add", ["s", "part"], ["m"]),
            node("Tanh", ["m"], ["s_out"]),
        ],
        "scanned",
        [helper.make_tensor_value_info(name, FLOAT, None) for name in ("s", "part")],
        [helper.make_empty_tensor_value_info("s_out")],
    )
    looped = helper.make_graph(
        [
            node("Identity", ["on"], ["on_out"]),
            node("MatMul", ["t", "w"], ["p"]),
            node("Add", ["p", "t_out"], ["last"]),
        ],
        "looped",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("on", BOOL, []),
            helper.make_tensor_value_info("t", FLOAT, None),
        ],
        [helper.make_empty_tensor_value_info(name) for name in ("on_out", "last")],
    )
    nodes = [
        node("ReduceSum", ["x", "time"], ["first"], keepdims=0),
        node("Scan", ["first", "x"], ["t_out"], body=scanned, num_scan_inputs=1,
             scan_input_axes=[1]),
        node("Loop", ["trips", "", "t_out"], ["y"], body=looped),
    ]  # fmt: skip
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32) / 16
    constants = {"time": np.asarray([1]), "trips": np.asarray(100), "w": weight}
    return model(nodes, {"x": (FLOAT, ["N", 6, 8])}, ["y"], constants)


def steps(number: int) -> dict[str, Tensor]:
    return {"x": np.random.default_rng(number).standard_normal((1, 6, 8), np.float32)}


def text_by_number() -> Any:
    """Return an attention layer whose mask and result are gathered by row indices.

    As PyTorch's exporters write it: the mask by vectors `[row, column]`, and each row's last
    word from the flattened rows.
    """
    nodes = [
        node("Shape", ["input_ids"], ["shape"]),
        node("Gather", ["shape", "zero"], ["n"]),
        node("Range", ["zero", "n", "one"], ["rows"]),
        node("Unsqueeze", ["n", "first"], ["n1"]),
        node("Concat", ["n1", "middle"], ["wide"], axis=0),
        node("Unsqueeze", ["rows", "last_two"], ["rows3"]),
        node("Expand", ["rows3", "wide"], ["row_column"]),
        node("Expand", ["columns", "wide"], ["column_column"]),
        node("Unsqueeze", ["row_column", "end"], ["row4"]),
        node("Unsqueeze", ["column_column", "end"], ["column4"]),
        node("Concat", ["row4", "column4"], ["vectors"], axis=-1),
        node("Cast", ["attention_mask"], ["seen"], to=BOOL),
        node("GatherND", ["seen", "vectors"], ["seen3"]),
        node("Gather", ["table", "input_ids"], ["words"]),
        node("Transpose", ["words"], ["turned"], perm=[0, 2, 1]),
        node("MatMul", ["words", "turned"], ["alike"]),
        node("Where", ["seen3", "alike", "never"], ["masked"]),
        node("Softmax", ["masked"], ["shares"], axis=-1),
        node("MatMul", ["shares", "words"], ["mixed"]),
        node("Equal", ["input_ids", "end_word"], ["is_end"]),
        node("Cast", ["is_end"], ["ends"], to=INT64),
        node("ArgMax", ["ends"], ["at"], axis=1, keepdims=0),
        node("Mul", ["rows", "length"], ["starts"]),
        node("Add", ["starts", "at"], ["flat_at"]),
        node("Reshape", ["mixed", "flat"], ["all_words"]),
        node("Gather", ["all_words", "flat_at"], ["y"]),
    ]
    integers = {
        "zero": 0,
        "one": 1,
        "first": [0],
        "middle": [1, 6],
        "last_two": [1, 2],
        "end": [-1],
        "columns": [[list(range(6))]],
        "end_word": 9,
        "length": 6,
        "flat": [-1, 4],
    }
    constants: dict[str, Tensor] = {name: np.asarray(one) for name, one in integers.items()}
    constants["table"] = np.random.default_rng(0).standard_normal((10, 4)).astype(np.float32)
    constants["never"] = np.asarray(-1e9, np.float32)
    given: Inputs = {name: (INT64, ["N", 6]) for name in ("input_ids", "attention_mask")}
    return model(nodes, given, ["y"], constants)


NETWORKS: dict[str, tuple[Callable[[], Any], dict[str, tuple[int, ...]], Make]] = {
    "ResNet-50": (lambda: networks.resnet50(32), {}, pixels(32)),
    "DistilBERT, 2 layers": (
        lambda: networks.distilbert(networks.Encoder()),
        {"sequence": (16,)},
        tokens(100, 16),
    ),
    "loops": (repeated, {}, steps),
    "text by number": (text_by_number, {}, tokens(10, 6)),
}
FULL_SIZE: dict[str, tuple[Callable[[], Any], dict[str, tuple[int, ...]], Make]] = {
    "ResNet-50, 224 pixels": (networks.resnet50, {}, pixels(224)),
    "DistilBERT, 6 layers": (
        lambda: networks.distilbert(networks.DISTILBERT),
        {"sequence": (128,)},
        tokens(30522, 128),
    ),
}


async def infer(stub: Any, given: dict[str, Tensor]) -> list[Tensor]:
    message = pb.ModelInferRequest(model_name="m")
    for name, tensor in given.items():
        message.inputs.add(name=name, datatype=str(datatype_of(tensor.dtype)), shape=tensor.shape)
        message.raw_input_contents.append(tensor.tobytes())
    answer = await stub.ModelInfer(message)
    return [
        np.frombuffer(raw, np.float32).reshape(output.shape)
        for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
    ]


async def check(serve: Serve, folder: Path, name: str) -> None:
    make, dimensions, sample = (NETWORKS | FULL_SIZE)[name]
    made = make()
    options = Options(dimensions=dimensions, max_batch_size=4, platforms=("cpu",))
    import_model(save(made, folder), folder / "models" / "m", options)
    (folder / "models/m/config.json").write_text(json.dumps({"dynamic_batching": PATIENT}))
    samples = [sample(number) for number in range(CLIENTS)]
    async with serve(folder / "models", load_model=("m",)) as server:
        server.gather("m", 4)
        async with grpc.aio.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            answers = await asyncio.gather(*(infer(stub, given) for given in samples))
        ((report,),) = (server.application.control.catalog.statistics("m"),)

    for given, answer in zip(samples, answers, strict=True):
        assert largest_difference(theirs(made, given), answer) < TOLERANCE
    assert CLIENTS == report.totals.inference_count
    assert report.totals.execution_count < CLIENTS


@pytest.mark.parametrize(
    "name",
    [
        "text by number",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("DistilBERT, 2 layers", "loops")),
        pytest.param("ResNet-50", marks=pytest.mark.large),
    ],
)
async def test_an_imported_network_is_served_in_batches(
    serve: Serve, tmp_path: Path, name: str
) -> None:
    """Answers equal onnxruntime's, whatever requests shared an execution."""
    await check(serve, tmp_path, name)


@pytest.mark.large
@pytest.mark.parametrize("name", FULL_SIZE)
async def test_a_network_of_full_size_is_served_in_batches(
    serve: Serve, tmp_path: Path, name: str
) -> None:
    await check(serve, tmp_path, name)
