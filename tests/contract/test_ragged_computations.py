"""`allow_ragged_batch` for JAX models, which get the concatenation of a batch's requests."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from support import asking
from support.asking import Client
from support.server import Serve

import xlaserve

ELEMENTS, REQUESTS = 16, 4
KINDS = {
    "count": ("BATCH_ELEMENT_COUNT", "INT32", [REQUESTS]),
    "ends": ("BATCH_ACCUMULATED_ELEMENT_COUNT", "FP32", [REQUESTS]),
    "bounds": ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", "INT32", [REQUESTS + 1]),
    "most": ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", "FP32", [12]),
    "items": ("BATCH_ITEM_SHAPE", "INT32", [REQUESTS, 1]),
    "flat": ("BATCH_ITEM_SHAPE_FLATTEN", "FP32", [REQUESTS]),
}


def model(params: Any, x: Any, *told: Any) -> Any:
    """Return the sum of each request, the batch inputs, and twice each element."""
    whole = [one.astype(jnp.int32) for one in told]
    count, ends, bounds, _, items, flat = whole
    # The same datatype with and without 64-bit types enabled.
    places = jnp.arange(x.shape[0], dtype=jnp.int32)
    whose = jnp.searchsorted(ends, places, side="right").astype(jnp.int32)
    sums = jax.ops.segment_sum(x, whose, num_segments=REQUESTS)
    said = jnp.stack([count, ends, bounds[:-1], bounds[1:], items[:, 0], flat], 1)
    return {"sum": sums[:, None], "told": said, "twice": 2 * x}


def config(**other: Any) -> dict[str, Any]:
    return {
        "max_batch_size": REQUESTS,
        "input": [
            {"name": "x", "data_type": "TYPE_FP32", "dims": [-1], "allow_ragged_batch": True}
        ],
        "output": [
            {"name": "sum", "data_type": "TYPE_FP32", "dims": [1]},
            {"name": "told", "data_type": "TYPE_INT32", "dims": [6]},
            {"name": "twice", "data_type": "TYPE_FP32", "dims": [-1]},
        ],
        "batch_input": [
            {
                "kind": kind,
                "target_name": [name],
                "data_type": f"TYPE_{datatype}",
                "source_input": ["x"],
            }
            for name, (kind, datatype, _) in KINDS.items()
        ],
        "batch_output": [{"target_name": ["twice"], "source_input": ["x"]}],
        "dynamic_batching": {
            "max_queue_delay_microseconds": 300_000,
            "preferred_batch_size": [REQUESTS - 1],
        },
        "parameters": {"batch_independent": {"string_value": "true"}},
    } | other


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    inputs: dict[str, Any] = {"x": ("FP32", [ELEMENTS])}
    inputs |= {name: (datatype, shape) for name, (_, datatype, shape) in KINDS.items()}
    xlaserve.export_model(model, {}, inputs, root / "m" / "1", max_batch_size=0)
    (root / "m" / "config.json").write_text(json.dumps(config()))
    return root


@pytest.fixture
async def client(serve: Serve, repository: Path) -> AsyncIterator[Client]:
    async with serve(repository, load_model=("m",)) as server, asking.client(server) as made:
        yield made


def x(size: int) -> "np.ndarray[Any, Any]":
    return np.arange(1, size + 1, dtype=np.float32)[None]


async def test_requests_of_different_shapes_share_an_execution(client: Client) -> None:
    """Batch inputs delimit the requests; answers are the same as without batching."""
    sizes = [3, 5, 1]
    found = await asyncio.gather(*(client.infer("m", x=x(size)) for size in sizes))
    alone = await client.infer("m", x=x(3))
    statistics: Any = await client.grpc.get_inference_statistics("m", as_json=True)

    for size, answer in zip(sizes, found, strict=True):
        assert [[size * (size + 1) / 2]] == answer["sum"].tolist()
        assert (2 * x(size)).tolist() == answer["twice"].tolist()
        count, end, begin, same_end, item, flat = answer["told"][0].tolist()
        assert [size] * 3 == [count, item, flat]
        assert [size, end] == [end - begin, same_end]
    assert sum(sizes) == max(int(answer["told"][0, 1]) for answer in found)
    assert [[6]] == alone["sum"].tolist()
    executed = statistics["model_stats"][0]
    assert (4, 2) == (int(executed["inference_count"]), int(executed["execution_count"]))


async def test_what_is_no_longer_free_waits_for_the_next_execution(client: Client) -> None:
    """A batch is limited by its elements; a single request may use the whole limit."""
    sizes = [12, 12, 4, 4, 4, 4, 4, 4]
    found = await asyncio.gather(*(client.infer("m", x=x(size)) for size in sizes))

    assert [size * (size + 1) / 2 for size in sizes] == [a["sum"][0, 0] for a in found]


async def test_a_request_that_is_too_large_is_refused(client: Client) -> None:
    large = await client.fails("m", x=x(13))
    rows = await client.fails("m", x=np.ones((2, 3), np.float32))
    metadata: Any = await client.grpc.get_model_metadata("m", as_json=True)

    assert "INVALID_ARGUMENT: model 'm', input 'x': expected at most 12 elements" in large
    assert "input 'x': expected one row" in rows
    assert [{"name": "x", "datatype": "FP32", "shape": ["-1", "-1"]}] == metadata["inputs"]
    assert ["-1", "-1"] == metadata["outputs"][2]["shape"]


async def test_what_cannot_be_obeyed_fails_the_load(client: Client) -> None:
    one = config()["batch_input"]
    plain = {"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}
    cases: dict[str, dict[str, Any]] = {
        "expected the parameter 'batch_independent' to be true": {"parameters": {}},
        "max_batch_size: expected at most 4": {"max_batch_size": 5},
        "expected allow_ragged_batch": {"input": [plain]},
        "optional is not possible with": {
            "input": [plain | {"allow_ragged_batch": True, "optional": True}]
        },
        "batch_input[0].source_input: expected": {
            "batch_input": [one[0] | {"source_input": ["z"]}]
        },
        "batch_input[0].data_type: expected": {
            "batch_input": [one[0] | {"data_type": "TYPE_FP64"}]
        },
        "batch_input[0].target_name: expected": {"batch_input": [one[0] | {"target_name": []}]},
        "batch_output[0].source_input: expected one": {
            "batch_output": [{"target_name": ["y"], "source_input": []}]
        },
        "is not an output of the configuration": {
            "batch_output": [{"target_name": ["y"], "source_input": ["x"]}]
        },
    }
    for text, other in cases.items():
        answer = await client.refused("m", config=json.dumps(config(**other)))

        assert text in answer, answer


async def test_an_onnx_model_is_served_as_triton_serves_it(serve: Serve, tmp_path: Path) -> None:
    value, tensor = onnx.helper.make_tensor_value_info, onnx.helper.make_tensor
    add = onnx.helper.make_node("Add", ["x", "x"], ["twice"])
    told = onnx.helper.make_node("Unsqueeze", ["ends", "axes"], ["told"])
    graph = onnx.helper.make_graph(
        [add, told],
        "ragged",
        [value("x", 1, [ELEMENTS]), value("ends", 1, [REQUESTS])],
        [value("twice", 1, [ELEMENTS]), value("told", 1, [REQUESTS, 1])],
        [tensor("axes", 7, [1], [1])],
    )
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    made.ir_version = 8
    (tmp_path / "o" / "1").mkdir(parents=True)
    onnx.save(made, tmp_path / "o" / "1" / "model.onnx")
    said = config()
    said["backend"] = "onnxruntime"
    said["output"] = [{**said["output"][0], "name": "told"}, said["output"][2]]
    said["batch_input"] = [said["batch_input"][1]]
    (tmp_path / "o" / "config.json").write_text(json.dumps(said))
    async with serve(tmp_path, load_model=("o",)) as server, asking.client(server) as client:
        found = await asyncio.gather(*(client.infer("o", x=x(size)) for size in (2, 3, 4)))

    assert [(2 * x(size)).tolist() for size in (2, 3, 4)] == [a["twice"].tolist() for a in found]
    assert 9 == max(a["told"][0, 0] for a in found)
