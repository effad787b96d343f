"""Serve a thousand fine-tunes of one computation from a single server; see README.md."""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1] / "tools")]

from serving import served, stay

from shared_models import parameters_of, tune
from xlaserve import export_model
from xlaserve.client import Client

COUNT = 1000
ASKED = 200


def adapted(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Apply a dense layer with an adapter of rank 2; a fine-tune changes both."""
    base = jnp.tanh(x @ params["base"] + params["bias"][None])
    return base + (x @ params["down"]) @ params["up"]


def expected(params: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Return the expected result, computed by numpy."""
    base = np.tanh(x @ params["base"] + params["bias"])
    return base + (x @ params["down"]) @ params["up"]


def main() -> None:
    """Export one model, write a thousand copies with other parameters, and query some of them."""
    shapes = {"base": (16, 16), "bias": (16,), "down": (16, 2), "up": (2, 16)}
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    with TemporaryDirectory() as folder:
        exported, models = Path(folder, "exported/1"), Path(folder, "models")
        inputs = {"x": ("FP32", [-1, 16])}
        export_model(adapted, params, inputs, exported, outputs=["y"], max_batch_size=2)
        for number in range(COUNT):
            tune(exported, models / f"tune-{number}" / "1", number)
        started = time.monotonic()
        explicit = ("--model-control-mode", "explicit", "--load-model", "*")
        with served(models, *explicit) as server:
            print(f"{COUNT} models are ready after {time.monotonic() - started:.1f} s")
            x = np.random.default_rng(0).standard_normal((1, 16)).astype(np.float32)
            wrong = 0
            with Client(server.grpc) as client:
                ready = sum(entry.state == "READY" for entry in client.index())
                for number in np.linspace(0, COUNT - 1, ASKED).astype(int):
                    answer = client.infer(f"tune-{number}", {"x": x})["y"]
                    own = parameters_of(models / f"tune-{number}" / "1")
                    wrong += not np.allclose(expected(own, x), answer, atol=1e-4)
                memory = sum(
                    int(use.get("byte_size", 0))
                    for row in client.statistics()
                    for use in row.get("memory_usage", ())
                )
            print(f"{ASKED} of them were asked, {wrong} answers are wrong")
            print(f"{memory / COUNT / 1024:.1f} KiB of memory for each, programs shared by all")
            stay(server)
            if wrong or ready != COUNT:
                sys.exit(f"that is not what was expected: {ready} are ready")


if __name__ == "__main__":
    main()
