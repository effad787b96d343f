"""The unmodified tritonclient against the example models."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton
from support.process import run
from support.server import Serve, serving
from tritonclient.utils import InferenceServerException

MODELS = ("digits", "identity", "mlp", "simple")


on_one_server = pytest.mark.asyncio(loop_scope="module")
"""For tests that only send requests: the models that they share take seconds to load."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="asked")
async def _asked(
    example_models: Path, tmp_path_factory: pytest.TempPathFactory, programs: str
) -> AsyncIterator[Any]:
    scratch = tmp_path_factory.mktemp("scratch")
    settings = {"load_model": ("*",), "compilation_cache_directory": programs}
    async with serving(scratch, example_models, **settings) as server:
        async with triton.InferenceServerClient(server.url) as connection:
            yield connection


@pytest.fixture
async def client(serve: Serve, example_models: Path) -> AsyncIterator[Any]:
    async with serve(example_models, load_model=("identity", "simple")) as server:
        async with triton.InferenceServerClient(server.url) as connection:
            yield connection


async def infer(client: Any, model: str, **arrays: Any) -> Any:
    inputs = []
    for name, array in arrays.items():
        datatype = {"float32": "FP32", "int32": "INT32"}[array.dtype.name]
        tensor = triton.InferInput(name, array.shape, datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return await client.infer(model, inputs)


@on_one_server
async def test_the_example_models_are_ready(asked: Any) -> None:
    assert await asked.is_server_live()
    assert await asked.is_server_ready()
    assert all([await asked.is_model_ready(name) for name in MODELS])


@on_one_server
@pytest.mark.parametrize("rows", [1, 3, 8])
async def test_simple_adds_and_subtracts(asked: Any, rows: int) -> None:
    a = np.arange(rows * 16, dtype=np.int32).reshape(rows, 16)
    b = np.full((rows, 16), 2, np.int32)
    result = await infer(asked, "simple", INPUT0=a, INPUT1=b)

    np.testing.assert_array_equal(a + b, result.as_numpy("OUTPUT0"))
    np.testing.assert_array_equal(a - b, result.as_numpy("OUTPUT1"))


@on_one_server
@pytest.mark.parametrize("rows", [1, 5, 64])
async def test_identity_gives_back_what_it_gets(asked: Any, rows: int) -> None:
    x = np.random.default_rng(rows).random((rows, 16), np.float32)
    result = await infer(asked, "identity", x=x)

    np.testing.assert_array_equal(x, result.as_numpy("y"))


def mlp_by_hand(x: Any) -> Any:
    random = np.random.RandomState(7)
    sizes = ((784, 512), (512,), (512, 10), (10,))
    w1, b1, w2, b2 = ((random.standard_normal(size) * 0.05).astype(np.float32) for size in sizes)
    return np.maximum(x @ w1 + b1, 0) @ w2 + b2


@on_one_server
@pytest.mark.parametrize("rows", [1, 7, 64])
async def test_mlp_agrees_with_numpy(asked: Any, rows: int) -> None:
    x = np.random.default_rng(rows).random((rows, 784), np.float32)
    result = await infer(asked, "mlp", x=x)

    np.testing.assert_allclose(mlp_by_hand(x), result.as_numpy("y"), rtol=1e-4, atol=1e-4)


@on_one_server
async def test_a_batch_over_the_maximum_is_refused(asked: Any) -> None:
    with pytest.raises(InferenceServerException, match="a batch of 1 to 8 rows"):
        await infer(
            asked,
            "simple",
            INPUT0=np.zeros((9, 16), np.int32),
            INPUT1=np.zeros((9, 16), np.int32),
        )


async def test_load_infer_reload_unload_index(client: Any) -> None:
    """Triton's model control, as in its example client."""
    await client.unload_model("simple")

    assert not await client.is_model_ready("simple")

    with pytest.raises(InferenceServerException, match="Request for unknown model"):
        await client.get_model_metadata("simple")
    with pytest.raises(InferenceServerException, match="failed to load"):
        await client.load_model("wrong_model")

    await client.load_model("simple", config='{"max_batch_size":"16"}')
    rows = np.zeros((16, 16), np.int32)
    await infer(client, "simple", INPUT0=rows, INPUT1=rows)
    index = await client.get_model_repository_index(as_json=True)

    states = {model["name"]: model.get("state") for model in index["models"]}
    assert set(MODELS) == states.keys()
    assert ["identity", "simple"] == sorted(name for name in MODELS if states[name] == "READY")


async def test_a_bad_artifact_keeps_the_old_model_serving(
    client: Any, example_models: Path
) -> None:
    files = {
        f"file:1/{path.name}": path.read_bytes()
        for path in (example_models / "identity/1").iterdir()
    }
    files["file:1/model.jaxexp"] = files["file:1/model.jaxexp"][:-7]
    with pytest.raises(InferenceServerException, match="failed to load 'identity'.*model.jaxexp"):
        await client.load_model("identity", config="{}", files=files)

    x = np.ones((1, 16), np.float32)
    result = await infer(client, "identity", x=x)

    np.testing.assert_array_equal(x, result.as_numpy("y"))


async def test_the_script_of_the_readme(serve: Serve, example_models: Path) -> None:
    script = example_models.parent / "triton_client.py"
    async with serve(example_models, load_model=("simple",)) as server:
        status, out, err = await run(sys.executable, str(script), server.url)

    assert (0, "") == (status, err)
    assert ["1", "16"] == [out.split("[")[1].split()[0], out.splitlines()[0].split()[-1].strip("]")]


async def test_an_inference_in_progress_survives_a_reload(client: Any) -> None:
    """Requests continue without a single failure while the model is reloaded repeatedly."""
    x = np.ones((1, 16), np.float32)
    done = asyncio.Event()

    async def traffic() -> int:
        count = 0
        while not done.is_set():
            result = await infer(client, "identity", x=x)
            np.testing.assert_array_equal(x, result.as_numpy("y"))
            count += 1
        return count

    running = [asyncio.create_task(traffic()) for _ in range(4)]
    for size in (4, 2, 1):
        await client.load_model("identity", config=f'{{"max_batch_size": {size}}}')
    done.set()

    assert all(count > 0 for count in await asyncio.gather(*running))
