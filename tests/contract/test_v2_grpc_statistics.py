"""The statistics and model configuration extensions over gRPC, with the unmodified tritonclient."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from support.server import Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from xlaserve_proto import inference as ours


@pytest.fixture
async def client(serve: Serve, example_models: Path) -> AsyncIterator[Any]:
    async with serve(example_models, load_model=("simple", "identity")) as server:
        async with triton.InferenceServerClient(server.url) as connection:
            yield connection


async def infer(client: Any, rows: int, *, columns: int = 16) -> None:
    tensor = triton.InferInput("x", [rows, columns], "FP32")
    tensor.set_data_from_numpy(np.zeros((rows, columns), np.float32))
    await client.infer("identity", [tensor])


async def statistics(client: Any, *asked: str) -> list[dict[str, Any]]:
    answer = await client.get_inference_statistics(*asked, as_json=True)
    rows: list[dict[str, Any]] = answer["model_stats"]
    return rows


async def status_of(call: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        await call
    return str(caught.value.status())


# --- statistics extension ---


async def test_model_statistics_count_requests_rows_and_batches(client: Any) -> None:
    """64-bit numbers are strings in proto-JSON."""
    for rows in (1, 3, 3):
        await infer(client, rows)
    (found,) = await statistics(client, "identity")
    counts = {name: each.get("count") for name, each in found["inference_stats"].items()}

    assert ("identity", "1", "7", "3") == (
        found["name"],
        found["version"],
        found["inference_count"],
        found["execution_count"],
    )
    assert {
        "success": "3",
        "queue": "3",
        "compute_input": "3",
        "compute_infer": "3",
        "compute_output": "3",
        "fail": None,
        "cache_hit": None,
        "cache_miss": None,
    } == counts
    assert [("1", "1"), ("3", "2")] == [
        (batch["batch_size"], batch["compute_infer"]["count"]) for batch in found["batch_stats"]
    ]
    assert int(found["last_inference"]) > 1_700_000_000_000


async def test_the_parts_of_a_request_add_up(client: Any) -> None:
    await infer(client, 2)
    (found,) = await statistics(client, "identity", "1")
    times = {name: int(each.get("ns", 0)) for name, each in found["inference_stats"].items()}

    assert (
        0
        < times["success"]
        == sum(
            times[name] for name in ("queue", "compute_input", "compute_infer", "compute_output")
        )
    )


async def test_requests_that_do_not_fit_are_failures(client: Any) -> None:
    """One has a wrong shape, the other has invalid tensor bytes."""
    assert "StatusCode.INVALID_ARGUMENT" == await status_of(infer(client, 1, columns=15))
    tensor = triton.InferInput("x", [1, 16], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 16), np.float32))
    tensor._raw_content = b"short"
    assert "StatusCode.INVALID_ARGUMENT" == await status_of(client.infer("identity", [tensor]))
    (found,) = await statistics(client, "identity")

    assert "2" == found["inference_stats"]["fail"]["count"]
    assert "count" not in found["inference_stats"]["success"]


async def test_memory_usage_is_what_the_model_holds(client: Any) -> None:
    (found,) = await statistics(client, "simple")
    (use,) = found["memory_usage"]

    assert "CPU" == use["type"]
    assert 0 < int(use["byte_size"])


async def test_what_compilation_took_is_told_in_an_extension(client: Any) -> None:
    """Clients that know the field get every batch size; others skip it."""
    ask = pb.ModelStatisticsRequest(name="identity")
    answer = await client._client_stub.ModelStatistics(ask)
    (found,) = ours.ModelStatisticsResponse().parse(answer.SerializeToString()).model_stats
    compiled = found.compile_stats

    assert [row.batch_size for row in compiled] == sorted({row.batch_size for row in compiled})
    assert (1, 64) == (compiled[0].batch_size, compiled[-1].batch_size)
    assert all(row.compile_ns > row.execution_ns > 0 and not row.sizes for row in compiled)


async def test_an_empty_name_is_every_model(client: Any) -> None:
    assert ["identity", "simple"] == [row["name"] for row in await statistics(client)]


@pytest.mark.parametrize("asked", [("nope",), ("simple", "9"), ("mlp",)])
async def test_statistics_of_what_is_not_loaded_are_not_found(
    client: Any, asked: tuple[str, ...]
) -> None:
    call = client.get_inference_statistics(*asked)

    assert "StatusCode.NOT_FOUND" == await status_of(call)


# --- model configuration extension ---


async def test_model_config(client: Any) -> None:
    answer = await client.get_model_config("simple", as_json=True)
    config = answer["config"]

    assert ("simple", "jax_export", "jax_export", 8) == (
        config["name"],
        config["platform"],
        config["backend"],
        config["max_batch_size"],
    )
    assert [("INPUT0", "TYPE_INT32", ["16"]), ("INPUT1", "TYPE_INT32", ["16"])] == [
        (tensor["name"], tensor["data_type"], tensor["dims"]) for tensor in config["input"]
    ]
    assert ["OUTPUT0", "OUTPUT1"] == [tensor["name"] for tensor in config["output"]]


async def test_a_config_may_be_sent_back(client: Any) -> None:
    before = await client.get_model_config("simple", "1", as_json=True)
    await client.load_model("simple", config=json.dumps(before["config"]))

    assert before == await client.get_model_config("simple", as_json=True)


@pytest.mark.parametrize("asked", [("nope",), ("simple", "9"), ("mlp",)])
async def test_the_config_of_what_is_not_loaded_is_not_found(
    client: Any, asked: tuple[str, ...]
) -> None:
    assert "StatusCode.NOT_FOUND" == await status_of(client.get_model_config(*asked))
