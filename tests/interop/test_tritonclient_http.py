"""The unmodified tritonclient over HTTP: its blocking and its asyncio client."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from support.server import RunningServer, Serve
from tritonclient.utils import InferenceServerException


@pytest.fixture
async def server(serve: Serve, example_models: Path) -> AsyncIterator[RunningServer]:
    async with serve(example_models, load_model=("simple",), http_endpoint="port:0") as running:
        yield running


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[Any]:
    async with triton_aio.InferenceServerClient(server.http) as connection:
        yield connection


async def blocking(server: RunningServer, call: Callable[[Any], Any]) -> Any:
    """Run a call of the blocking client in a thread, which creates and closes the client."""
    assert server.http is not None
    return await asyncio.to_thread(_in_thread, server.http, call)


def _in_thread(url: str, call: Callable[[Any], Any]) -> Any:
    with _client(url) as connection:
        return call(connection)


@contextmanager
def _client(url: str) -> Iterator[Any]:
    connection = triton.InferenceServerClient(url, concurrency=2)
    try:
        yield connection
    finally:
        connection.close()


def numbers(rows: int = 2) -> tuple[Any, Any]:
    a = np.arange(rows * 16, dtype=np.int32).reshape(rows, 16)
    return a, np.full((rows, 16), 2, np.int32)


def inputs_of(a: Any, b: Any, *, binary: tuple[bool, bool]) -> list[Any]:
    inputs = [triton.InferInput(name, a.shape, "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor, array, is_binary in zip(inputs, (a, b), binary, strict=True):
        tensor.set_data_from_numpy(array, binary_data=is_binary)
    return inputs


def check_sums(result: Any, a: Any, b: Any) -> None:
    np.testing.assert_array_equal(a + b, result.as_numpy("OUTPUT0"))
    np.testing.assert_array_equal(a - b, result.as_numpy("OUTPUT1"))


# --- blocking ----------------------------------------------------------------------------------


async def test_health_and_metadata(server: RunningServer) -> None:
    def ask(client: Any) -> Any:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("simple")
        assert not client.is_model_ready("nope")
        return client.get_server_metadata(), client.get_model_metadata("simple", "1")

    metadata, model = await blocking(server, ask)

    assert "xlaserve" == metadata["name"]
    assert ["INPUT0", "INPUT1"] == [tensor["name"] for tensor in model["inputs"]]


@pytest.mark.parametrize("inputs_binary", [(True, True), (False, False), (True, False)])
@pytest.mark.parametrize("outputs_binary", [(True, True), (False, False), (False, True)])
async def test_json_and_binary_tensors_may_be_mixed(
    server: RunningServer, inputs_binary: tuple[bool, bool], outputs_binary: tuple[bool, bool]
) -> None:
    a, b = numbers()

    def infer(client: Any) -> Any:
        outputs = [
            triton.InferRequestedOutput(name, binary_data=is_binary)
            for name, is_binary in zip(("OUTPUT0", "OUTPUT1"), outputs_binary, strict=True)
        ]
        inputs = inputs_of(a, b, binary=inputs_binary)
        return client.infer("simple", inputs, outputs=outputs, request_id="42")

    result = await blocking(server, infer)

    check_sums(result, a, b)
    assert "42" == result.get_response()["id"]


@pytest.mark.parametrize("sent", [None, "gzip", "deflate"])
@pytest.mark.parametrize("wanted", [None, "gzip", "deflate"])
async def test_compression(server: RunningServer, sent: str | None, wanted: str | None) -> None:
    """The reported JSON length is the one before compression."""
    a, b = numbers(8)

    def infer(client: Any) -> Any:
        return client.infer(
            "simple",
            inputs_of(a, b, binary=(True, True)),
            request_compression_algorithm=sent,
            response_compression_algorithm=wanted,
        )

    check_sums(await blocking(server, infer), a, b)


async def test_requests_side_by_side(server: RunningServer) -> None:
    a, b = numbers()

    def infer(client: Any) -> list[Any]:
        inputs = inputs_of(a, b, binary=(True, True))
        requests = [client.async_infer("simple", inputs) for _ in range(20)]
        return [request.get_result() for request in requests]

    for result in await blocking(server, infer):
        check_sums(result, a, b)


async def test_errors_are_told(server: RunningServer) -> None:
    a, b = numbers()

    def infer(client: Any, model: str, inputs: list[Any]) -> str:
        with pytest.raises(InferenceServerException) as caught:
            client.infer(model, inputs)
        return str(caught.value)

    both = inputs_of(a, b, binary=(True, True))
    unknown = await blocking(server, lambda client: infer(client, "nope", both))
    missing = await blocking(server, lambda client: infer(client, "simple", both[:1]))

    assert "Request for unknown model: 'nope' is not found" in unknown
    assert "expected 2 inputs but got 1" in missing


async def test_the_repository(server: RunningServer) -> None:
    def control(client: Any) -> Any:
        client.unload_model("simple")
        unloaded = client.is_model_ready("simple")
        client.load_model("simple", config=json.dumps({"max_batch_size": 2}))
        return unloaded, client.is_model_ready("simple"), client.get_model_repository_index()

    unloaded, loaded, index = await blocking(server, control)

    assert (False, True) == (unloaded, loaded)
    assert "READY" == {row["name"]: row["state"] for row in index}["simple"]


async def test_a_load_with_files(server: RunningServer, example_models: Path) -> None:
    files = {
        f"file:1/{file.name}": file.read_bytes() for file in (example_models / "mlp/1").iterdir()
    }

    def control(client: Any) -> bool:
        client.load_model("other", config="{}", files=files)
        return bool(client.is_model_ready("other"))

    assert await blocking(server, control)


async def test_configuration_and_statistics(server: RunningServer) -> None:
    def ask(client: Any) -> Any:
        a, b = numbers()
        client.infer("simple", inputs_of(a, b, binary=(True, True)))
        return client.get_model_config("simple"), client.get_inference_statistics("simple")

    config, statistics = await blocking(server, ask)

    assert "simple" == config["name"]
    assert ["INPUT0", "INPUT1"] == [tensor["name"] for tensor in config["input"]]
    (row,) = statistics["model_stats"]
    assert 1 == row["inference_stats"]["success"]["count"]
    assert 2 == row["inference_count"]


# --- asyncio -----------------------------------------------------------------------------------


async def test_the_asyncio_client(client: Any) -> None:
    a, b = numbers()
    results = await asyncio.gather(
        *(
            client.infer("simple", inputs_of(a, b, binary=(True, binary)))
            for binary in (True, False)
        )
    )

    assert await client.is_server_live()
    assert await client.is_server_ready()
    assert await client.is_model_ready("simple")
    for result in results:
        check_sums(result, a, b)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_the_asyncio_client_compresses(client: Any, coding: str) -> None:
    a, b = numbers(8)
    result = await client.infer(
        "simple",
        inputs_of(a, b, binary=(True, True)),
        request_compression_algorithm=coding,
        response_compression_algorithm=coding,
    )

    check_sums(result, a, b)


async def test_the_asyncio_client_controls_the_repository(client: Any) -> None:
    await client.unload_model("simple")
    assert not await client.is_model_ready("simple")
    await client.load_model("simple")
    assert await client.is_model_ready("simple")
    with pytest.raises(InferenceServerException, match="failed to load"):
        await client.load_model("nope")


async def test_every_answer_can_be_read_that_would_be_worth_compressing(
    serve: Serve, tmp_path: Path
) -> None:
    """aiohttp accepts gzip for every request; the asyncio client only decompresses inferences."""
    name = "m" * 200
    many = [f"input_{index}" for index in range(64)]
    tensors = [{"name": tensor, "data_type": "TYPE_FP32", "dims": [-1]} for tensor in many]
    config = json.dumps({"backend": "identity", "input": tensors, "output": tensors})
    for model in (name, *(f"{name}{index}" for index in range(8))):
        (tmp_path / "models" / model / "1").mkdir(parents=True)
        (tmp_path / "models" / model / "config.json").write_text(config)
    settings = {"load_model": ("*",), "http_endpoint": "port:0"}
    async with (
        serve(tmp_path / "models", **settings) as server,
        triton_aio.InferenceServerClient(server.http) as client,
    ):
        assert "xlaserve" == (await client.get_server_metadata())["name"]
        assert many == [i["name"] for i in (await client.get_model_metadata(name))["inputs"]]
        assert many == [i["name"] for i in (await client.get_model_config(name))["input"]]
        assert 9 == len(await client.get_model_repository_index())
        assert 9 == len((await client.get_inference_statistics())["model_stats"])
        with pytest.raises(InferenceServerException, match="xxx.*not found"):
            await client.get_model_metadata("x" * 2000)
        inputs = [triton.InferInput(tensor, [9], "FP32") for tensor in many]
        for tensor in inputs:
            tensor.set_data_from_numpy(np.ones(9, np.float32))
        result = await client.infer(name, inputs, response_compression_algorithm="gzip")
        assert [1.0] * 9 == np.asarray(result.as_numpy(many[-1])).tolist()
        await client.unload_model(name)
        await client.load_model(name)
        await client.unregister_system_shared_memory()
        await client.unregister_cuda_shared_memory("a")
