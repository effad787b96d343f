"""Rows of different clients in one batch must not affect one another."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from support import mixing_models
from support.http import ask
from support.server import RunningServer, Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from xlaserve import export_model
from xlaserve.tensors import Tensor

CLIENTS = 9
ROUNDS = 10
PATIENT = {"max_batch_size": 16, "dynamic_batching": {"max_queue_delay_microseconds": "2000"}}
"""Requests wait for others, so that a server that batches does so in every round."""

Open = Callable[..., AbstractAsyncContextManager[tuple[RunningServer, Any]]]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model that was once batched by mistake, as exported."""
    root = tmp_path_factory.mktemp("mixing") / "models"
    for name in mixing_models.NAMES:
        mixing_models.export(name, root)
    return root


@pytest.fixture
def start(serve: Serve, repository: Path) -> Open:
    """A server with these models, and its client."""

    @asynccontextmanager
    async def opened(
        where: Path = repository, **settings: Any
    ) -> AsyncIterator[tuple[RunningServer, Any]]:
        settings = {"http_endpoint": "port:0", "background_compile": False} | settings
        async with serve(where, **settings) as server, grpc.aio.insecure_channel(server.url) as c:
            yield server, service_pb2_grpc.GRPCInferenceServiceStub(c)

    return opened


async def load(stub: Any, name: str, config: dict[str, Any] | None = None, **more: bytes) -> None:
    message = pb.RepositoryModelLoadRequest(model_name=name)
    if config is not None or more:
        message.parameters["config"].string_param = json.dumps(config or {})
    for file, content in more.items():
        message.parameters[file].bytes_param = content
    await stub.RepositoryModelLoad(message)


async def infer(stub: Any, name: str, x: Tensor) -> Tensor:
    message = pb.ModelInferRequest(model_name=name, raw_input_contents=[x.tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=x.shape)
    answer = await stub.ModelInfer(message)
    return np.frombuffer(answer.raw_output_contents[0], np.float32)


async def check_alike(stub: Any, name: str, kind: str, rounds: int = ROUNDS) -> None:
    """Send a request alone, then repeatedly next to eight others; the answer must not change."""
    rows = [mixing_models.row(kind, number) for number in range(CLIENTS)]
    alone = [await infer(stub, name, x) for x in rows]
    for _ in range(rounds):
        found = await asyncio.gather(*(infer(stub, name, x) for x in rows))
        for want, have in zip(alone, found, strict=True):
            np.testing.assert_array_equal(want, have, err_msg=name)


async def config_of(stub: Any, name: str) -> Any:
    return (await stub.ModelConfig(pb.ModelConfigRequest(name=name))).config


@pytest.mark.parametrize("config", [None, PATIENT], ids=["as exported", "patient"])
@pytest.mark.slow
async def test_answers_are_alike_alone_and_beside_neighbours(
    start: Open, config: dict[str, Any] | None
) -> None:
    async with start() as (_, stub):
        for name in mixing_models.NAMES:
            await load(stub, name, config)
            served = await config_of(stub, name)
            await check_alike(stub, name, name)

            assert (16 if config else 0) == served.max_batch_size
            assert served.parameters["batch_rows"].string_value.startswith("unknown: stablehlo.")


@pytest.mark.large
async def test_answers_are_alike_in_two_hundred_rounds(start: Open) -> None:
    async with start() as (_, stub):
        for name in mixing_models.NAMES:
            await load(stub, name, PATIENT)
            await check_alike(stub, name, name, rounds=200)


async def test_artifacts_of_before_anything_was_proved_are_safe(
    start: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Exported with max_batch_size 64 and no verdict, served without a configuration."""
    for name in ("running_sum", "by_the_largest"):
        mixing_models.make_old(mixing_models.export(name, tmp_path / "models"))
    async with start(tmp_path / "models") as (server, stub):
        for name in ("running_sum", "by_the_largest"):
            await load(stub, name)
            await check_alike(stub, name, name)
            info = server.application.engine.info(name)
            found = await infer(stub, name, np.ones((70, 4), np.float32))

            assert (0, 280) == (info.max_batch_size, len(found))
            assert info.notice.startswith("rows are unknown: stablehlo.")


async def test_any_number_of_rows_is_answered_as_it_is(start: Open) -> None:
    """The fifth of five rows of a running sum is their total, over REST and gRPC."""
    async with start() as (server, stub):
        await load(stub, "running_sum")
        assert server.http is not None
        for rows in (1, 5, 3, 5):
            x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
            tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 4], "data": x.tolist()}
            body = json.dumps({"inputs": [tensor]}).encode()
            answer = await ask(server.http, "POST", "/v2/models/running_sum/infer", body=body)
            found = await infer(stub, "running_sum", x)

            assert [rows, 4] == answer.json["outputs"][0]["shape"]
            assert np.cumsum(x, 0).ravel().tolist() == answer.json["outputs"][0]["data"]
            assert np.cumsum(x, 0).ravel().tolist() == found.tolist()


async def test_no_rows_are_refused(start: Open) -> None:
    async with start() as (_, stub):
        await load(stub, "running_sum")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await infer(stub, "running_sum", np.zeros((0, 4), np.float32))

    assert grpc.StatusCode.INVALID_ARGUMENT == caught.value.code()
    assert "'x': expected" in str(caught.value.details())


async def test_zero_that_is_written_means_that_requests_are_not_put_together(
    start: Open, tmp_path: Path
) -> None:
    """Even for a model with a complete proof; it then accepts any number of rows."""
    inputs = {"x": ("FP32", [-1, 4])}
    export_model(
        lambda p, x: x @ p["w"],
        {"w": mixing_models.WEIGHTS},
        inputs,
        tmp_path / "models" / "plain" / "1",
        outputs=["y"],
    )
    async with start(tmp_path / "models") as (server, stub):
        await load(stub, "plain")
        before = (await config_of(stub, "plain")).max_batch_size
        await load(stub, "plain", {"max_batch_size": 0})
        runner: Any = server.application.registry.resolve("plain")[1].runner
        served = await config_of(stub, "plain")
        await infer(stub, "plain", np.ones((100, 4), np.float32))
        await asyncio.gather(
            *(infer(stub, "plain", np.ones((1, 4), np.float32)) for _ in range(CLIENTS))
        )
        (report,) = server.application.control.catalog.statistics("plain")

    assert (64, 0, [-1, 4]) == (before, served.max_batch_size, list(served.input[0].dims))
    assert ("proved", 0) == (served.parameters["batch_rows"].string_value, runner.batch_limit)
    assert 1 + CLIENTS == report.totals.execution_count


async def test_served_configuration_can_be_sent_back(start: Open) -> None:
    from google.protobuf import json_format

    async with start() as (_, stub):
        for config in (None, PATIENT):
            await load(stub, "place", config)
            served = await config_of(stub, "place")
            await load(stub, "place", json_format.MessageToDict(served))

            assert served == await config_of(stub, "place")


async def test_padding_ends_where_the_rows_do(start: Open, tmp_path: Path) -> None:
    """A loop that each row leaves after its own number of steps, and a zero row never.

    Five rows are padded to six, both from one request and from five.
    """

    def doubled(params: None, x: jax.Array) -> jax.Array:
        def one(row: jax.Array) -> jax.Array:
            return jax.lax.while_loop(lambda v: abs(v).max() < 100, lambda v: v * 2, row)

        return jax.vmap(one)(x)

    inputs = {"x": ("FP32", [-1, 4])}
    path = tmp_path / "models" / "doubled" / "1"
    export_model(doubled, None, inputs, path, outputs=["y"])
    x = np.linspace(1, 7, 20, dtype=np.float32).reshape(5, 4)
    config = {**PATIENT, "parameters": {"batch_sizes": {"string_value": "6,16"}}}
    async with start(tmp_path / "models") as (_, stub):
        await load(stub, "doubled", config)
        together = await infer(stub, "doubled", x)
        apart = await asyncio.gather(*(infer(stub, "doubled", x[i : i + 1]) for i in range(5)))

    assert 100 <= together.reshape(5, 4).max(axis=1).min()
    assert together.tolist() == np.concatenate(apart).tolist()


def behind_one_another(p: None, x: jax.Array, y: jax.Array) -> jax.Array:
    """Concatenate five and three rows, and slice as if each had three."""
    b = x.shape[0]
    z = jnp.concatenate([y.reshape(-1, 6), x.reshape(-1, 6)])
    _, c, _ = jnp.split(z, [3 * b, 6 * b])
    return c.reshape(b, 3, 6)


async def test_blocks_of_rows_of_two_lengths_are_never_put_together(
    start: Open, tmp_path: Path
) -> None:
    inputs = {"x": ("FP32", [-1, 5, 6]), "y": ("FP32", [-1, 3, 6])}
    path = tmp_path / "models" / "blocks" / "1"
    export_model(behind_one_another, None, inputs, path, outputs=["z"])
    rows = [[np.full((1, n, 6), i, np.float32) for n in (5, 3)] for i in range(CLIENTS)]

    async def ask_for(stub: Any, x: Tensor, y: Tensor) -> list[float]:
        message = pb.ModelInferRequest(
            model_name="blocks", raw_input_contents=[x.tobytes(), y.tobytes()]
        )
        for name, tensor in (("x", x), ("y", y)):
            message.inputs.add(name=name, datatype="FP32", shape=tensor.shape)
        answer = await stub.ModelInfer(message)
        seen = np.unique(np.frombuffer(answer.raw_output_contents[0], np.float32))
        return [float(one) for one in seen]

    async with start(tmp_path / "models") as (_, stub):
        await load(stub, "blocks", PATIENT)
        found = [
            await asyncio.gather(*(ask_for(stub, *both) for both in rows)) for _ in range(ROUNDS)
        ]

    assert [[[float(i)] for i in range(CLIENTS)]] * ROUNDS == found


def sorted_and_back(p: None, x: jax.Array) -> jax.Array:
    """Sort rows by expert and back: nothing is mixed, but nothing is proved either."""
    order = jnp.argsort(x[:, 0])
    return jnp.zeros_like(x).at[order].set(x[order] * 2)


async def test_what_cannot_be_followed_is_batched_on_its_authors_word(
    start: Open, tmp_path: Path
) -> None:
    inputs = {"x": ("FP32", [-1, 4])}
    for name, declared in (("silent", None), ("declared", True)):
        path = tmp_path / "models" / name / "1"
        export_model(sorted_and_back, None, inputs, path, outputs=["y"], batch_independent=declared)
    true = {"parameters": {"batch_independent": {"string_value": "true"}}}
    async with start(tmp_path / "models") as (_, stub):
        for name, config, expected in (
            ("silent", None, 0),
            ("declared", None, 64),
            ("silent", true, 64),
        ):
            await load(stub, name, config)
            served = await config_of(stub, name)
            found = await infer(stub, name, np.ones((3, 4), np.float32))

            assert (expected, [2.0] * 12) == (served.max_batch_size, found.tolist())
            assert served.parameters["batch_rows"].string_value.startswith("unknown: stablehlo.")


# --- Attacks -------------------------------------------------------------------------------------


def forged(version: Path) -> dict[str, bytes]:
    """Return a version's files, with false claims in the manifest."""
    document = json.loads((version / "model.json").read_text())
    document |= {"verdict": {"independence": "proved"}, "max_batch_size": 64}
    files = {f"file:1/{path.name}": path.read_bytes() for path in version.iterdir()}
    return files | {"file:1/model.json": json.dumps(document).encode()}


async def test_a_manifest_is_not_believed(start: Open, repository: Path) -> None:
    """A client's manifest says "proved"; the load does its own proof."""
    async with start() as (_, stub):
        await load(stub, "noise", PATIENT, **forged(repository / "noise" / "1"))
        await check_alike(stub, "noise", "noise")
        served = await config_of(stub, "noise")

    assert served.parameters["batch_rows"].string_value.startswith("unknown: stablehlo.")


async def test_nobodys_word_counts_against_the_proof(start: Open, repository: Path) -> None:
    """Neither a configuration nor a client's manifest can override it."""
    config = {"parameters": {"batch_independent": {"string_value": "true"}}}
    files = forged(repository / "place" / "1")
    document = json.loads(files["file:1/model.json"]) | {"batch_independent": True}
    files["file:1/model.json"] = json.dumps(document).encode()
    async with start() as (_, stub):
        for said, sent in ((config, {}), ({}, files)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await load(stub, "place", said, **sent)

            assert grpc.StatusCode.FAILED_PRECONDITION == caught.value.code()
            text = str(caught.value.details())
            assert "declared independent, but they are not: output 'y' of a row changes" in text
            assert ": the row [" in text


async def test_steps_of_an_ensemble_do_not_see_other_requests(
    start: Open, tmp_path: Path, repository: Path
) -> None:
    """Two mixing models in sequence, in an ensemble that claims to support batching."""
    root = tmp_path / "models"
    root.mkdir()
    for name in ("running_sum", "place"):
        (root / name).symlink_to(repository / name)
    dims = [{"name": name, "data_type": "TYPE_FP32", "dims": [4]} for name in ("x", "y")]
    steps = [
        {"model_name": "running_sum", "input_map": {"x": "x"}, "output_map": {"y": "between"}},
        {"model_name": "place", "input_map": {"x": "between"}, "output_map": {"y": "y"}},
    ]
    config = {
        "platform": "ensemble",
        "max_batch_size": 16,
        "input": dims[:1],
        "output": dims[1:],
        "ensemble_scheduling": {"step": steps},
    }
    (root / "both").mkdir()
    (root / "both" / "config.json").write_text(json.dumps(config))
    async with start(root, model_root=(repository,)) as (_, stub):
        await load(stub, "both")
        await check_alike(stub, "both", "running_sum")
        x = np.arange(12, dtype=np.float32).reshape(3, 4)
        found = await infer(stub, "both", x)

    np.testing.assert_allclose((np.cumsum(x, 0) + np.arange(3)[:, None]).ravel(), found)


async def test_replicas_and_a_bound_of_shapes_change_nothing(start: Open) -> None:
    """Two replicas, and space for one shape besides a single row's, so that shapes are evicted."""
    config = {
        "instance_group": [{"kind": "KIND_CPU", "count": 2}],
        "parameters": {"max_on_demand_shapes": {"string_value": "1"}},
    }
    async with start() as (server, stub):
        await load(stub, "running_sum", config)
        await check_alike(stub, "running_sum", "running_sum", rounds=3)
        for rows in (2, 3, 2):
            x = np.ones((rows, 4), np.float32)
            found = await infer(stub, "running_sum", x)

            assert np.cumsum(x, 0).ravel().tolist() == found.tolist()
        info = server.application.engine.info("running_sum")

    assert ([1, 2], 3) == ([bucket.rows for bucket in info.buckets], info.on_demand_compilations)


async def test_a_mesh_that_splits_batches_changes_nothing(start: Open) -> None:
    """Two devices: a request's rows may be on both, and still mix as the model defines."""
    said = {
        "devices": "all",
        "placement": "shard",
        "mesh": "data=2,model=1",
        "partition": '{"w": [null, "model"]}',
    }
    config = {"parameters": {name: {"string_value": text} for name, text in said.items()}}
    async with start() as (_, stub):
        await load(stub, "quantised")
        x = np.concatenate([mixing_models.row("quantised", number) for number in range(4)])
        expected = await infer(stub, "quantised", x)
        await load(stub, "quantised", config)
        await check_alike(stub, "quantised", "quantised", rounds=3)

        np.testing.assert_allclose(expected, await infer(stub, "quantised", x), rtol=1e-5)


async def test_without_shapes_on_demand_only_those_of_the_load_are_answered(start: Open) -> None:
    config = {
        "parameters": {
            "max_on_demand_shapes": {"string_value": "0"},
            "batch_sizes": {"string_value": "1,4"},
        }
    }
    async with start() as (_, stub):
        await load(stub, "running_sum", config)
        await check_alike(stub, "running_sum", "running_sum", rounds=3)
        assert 16 == len(await infer(stub, "running_sum", np.ones((4, 4), np.float32)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await infer(stub, "running_sum", np.ones((3, 4), np.float32))

    assert grpc.StatusCode.INVALID_ARGUMENT == caught.value.code()
    assert "expected dimension 0 of size 1, 4 (batch_sizes)" in str(caught.value.details())
