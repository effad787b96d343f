"""The models for comparisons with other servers compute what their descriptions say."""

from pathlib import Path

import numpy as np
import pytest
from support.server import Serve

from make_bench_models import BIG, MODELS, make, mlp_parameters, models
from xlaserve.dialing.over_grpc import Client
from xlaserve.tensors import DATATYPES, Tensor, TensorSpec

FP32 = DATATYPES["FP32"]


def expected(model: str, x: Tensor) -> Tensor:
    """Compute a model's result with numpy."""
    if model == "mlp":
        w = mlp_parameters()
        hidden = np.maximum(x @ w["w1"] + w["b1"][None], 0)
        return np.asarray(hidden @ w["w2"] + w["b2"][None])
    return np.asarray(x.mean(axis=(2, 3))) if model == "image" else x


@pytest.mark.slow
async def test_models_agree_with_numpy(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`big` is made small for this test."""
    monkeypatch.setattr("make_bench_models.BIG", 8)
    make(tmp_path / "models")
    shapes = {
        "identity": (3, 16),
        "identity_cached": (3, 16),
        "mlp": (2, 784),
        "image": (1, 3, 224, 224),
        "big": (8,),
    }
    found = {}
    random = np.random.default_rng(0)
    sent = {name: random.random(shape, np.float32) for name, shape in shapes.items()}
    async with serve(tmp_path / "models", load_model=tuple(shapes)) as server:
        async with Client(server.url, timeout=60) as client:
            for name, x in sent.items():
                result = await client.infer(name, "", [(TensorSpec("x", FP32, x.shape), x)])
                found[name] = result.outputs["y"]

        config = server.application.registry.resolve("identity_cached")[1].config

    assert config.response_cache
    assert sent.keys() == models().keys() == set(MODELS)
    for name, x in sent.items():
        np.testing.assert_allclose(found[name], expected(name, x), rtol=1e-4, atol=1e-4)


def test_the_large_message_is_64_mib() -> None:
    assert 64 * 2**20 == BIG * FP32.itemsize
