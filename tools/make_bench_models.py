"""Make the models of the server comparison, for any version of xlaserve.

    python tools/make_bench_models.py DIRECTORY

    identity   FP32[-1,16]          the same array
    identity_cached                 the same with a response cache
    mlp        FP32[-1,784]         FP32[-1,10]: 784-512-10, relu, weights from a fixed seed
    image      FP32[-1,3,224,224]   FP32[-1,3]: the mean of each channel
    big        FP32[16777216]       the same array, 64 MiB of it

Input x, output y. Peers leave the size of `big` open; a compiled model has a fixed shape.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve import Exportable

BIG = 16 * 2**20
"""Elements of the large message."""
SEED = 7


CACHED = "identity_cached"
"""`identity` with a response cache, as the kit configures it for Triton."""
MODELS = ("identity", CACHED, "mlp", "image", "big")
"""The names of all models."""


def same(params: None, x: jax.Array) -> jax.Array:
    """Return the input."""
    return x


def mlp(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Return ten scores for each row."""
    hidden = jnp.maximum(x @ params["w1"] + params["b1"][None], 0)
    return hidden @ params["w2"] + params["b2"][None]


def channel_means(params: None, x: jax.Array) -> jax.Array:
    """Return the mean of each channel."""
    return jnp.mean(x, axis=(2, 3))


def mlp_parameters() -> dict[str, np.ndarray]:
    """Return the weights of 784-512-10; the results depend on the order of the draws."""
    random = np.random.RandomState(SEED)
    shapes = {"w1": (784, 512), "b1": (512,), "w2": (512, 10), "b2": (10,)}
    return {
        name: (random.standard_normal(shape) * 0.05).astype(np.float32)
        for name, shape in shapes.items()
    }


def models() -> dict[str, Exportable]:
    """Return the models by name."""
    identity = Exportable(same, None, {"x": ("FP32", [-1, 16])}, ["y"], 64)
    return {
        "identity": identity,
        CACHED: identity,
        "mlp": Exportable(mlp, mlp_parameters(), {"x": ("FP32", [-1, 784])}, ["y"], 64),
        "image": Exportable(channel_means, None, {"x": ("FP32", [-1, 3, 224, 224])}, ["y"], 8),
        "big": Exportable(same, None, {"x": ("FP32", [BIG])}, ["y"], 0),
    }


def make(directory: Path) -> None:
    """Write version 1 of each model, replacing existing ones."""
    for name, model in models().items():
        path = model.write(directory / name / "1", overwrite=True)
        print(f"{path}: exported by jax {jax.__version__}")
    config = {"response_cache": {"enable": True}}
    (directory / CACHED / "config.json").write_text(json.dumps(config), encoding="utf-8")


def main() -> None:
    """Read the arguments and make the models."""
    parser = argparse.ArgumentParser(description="Make the models that servers are compared with.")
    parser.add_argument("directory", type=Path, metavar="DIRECTORY")
    make(parser.parse_args().directory)


if __name__ == "__main__":
    main()
