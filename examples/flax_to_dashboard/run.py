"""Train a Flax model, serve it, and watch it on a dashboard; see README.md."""

import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from serving import served, stay

from xlaserve import export_model
from xlaserve.client import Client

DASHBOARD = HERE.parents[1] / "deploy" / "grafana" / "xlaserve.json"
STEPS, RATE = 400, 0.5


class Classifier(nnx.Module):
    """Two dense layers that tell two spirals apart."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(6, 32, rngs=rngs)
        self.scores = nnx.Linear(32, 2, rngs=rngs)

    def __call__(self, points: jax.Array) -> jax.Array:
        """Return two scores for each 2-D point."""
        x, y = points[:, :1], points[:, 1:]
        radius = jnp.sqrt(x**2 + y**2)
        features = [x, y, jnp.sin(4 * radius), jnp.cos(4 * radius), x * radius, y * radius]
        return self.scores(jnp.tanh(self.hidden(jnp.concatenate(features, axis=1))))


def spirals(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points on two spirals, and which spiral each belongs to."""
    random = np.random.default_rng(seed)
    which = random.integers(0, 2, count)
    radius = random.uniform(0.3, 2, count)
    angle = 2.5 * radius + np.pi * which + random.normal(0, 0.1, count)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return points.astype(np.float32), which


def main() -> None:
    """Train, export and serve, send requests, and print what the dashboard would show."""
    classifier = Classifier(nnx.Rngs(0))
    definition, state = nnx.split(classifier)

    def predict(state: nnx.State, points: jax.Array) -> jax.Array:
        return nnx.merge(definition, state)(points)

    points, which = spirals(2000, seed=1)

    def loss(state: nnx.State) -> jax.Array:
        scores = jax.nn.log_softmax(predict(state, points))
        return -jnp.take_along_axis(scores, which[:, None], axis=1).mean()

    @jax.jit
    def trained(state: nnx.State) -> nnx.State:
        def step(_: int, state: nnx.State) -> nnx.State:
            return jax.tree.map(lambda p, g: p - RATE * g, state, jax.grad(loss)(state))

        return jax.lax.fori_loop(0, STEPS, step, state)

    state = trained(state)
    with TemporaryDirectory() as folder:
        models = Path(folder)
        inputs = {"points": ("FP32", [-1, 2])}
        export_model(
            predict, state, inputs, models / "spirals/1", outputs=["scores"], max_batch_size=64
        )
        with served(models) as server:
            asked, expected = spirals(640, seed=2)
            with Client(server.grpc) as client:
                answers = [
                    client.infer("spirals", {"points": rows})["scores"]
                    for rows in np.split(asked, 40)
                ]
            found = np.concatenate(answers).argmax(axis=1)
            share = float(np.mean(found == expected))
            print(f"held-out accuracy over gRPC: {share:.1%}")
            text = urlopen(f"{server.http}/metrics", timeout=60).read().decode()
            (count,) = re.findall(r'^nv_inference_count\{.*?"spirals".*?\} ([0-9.]+)', text, re.M)
            print(f"rows that the server has counted: {float(count):.0f}")
            wanted = set(re.findall(r"\b(?:xlaserve|nv)_[a-z0-9_]+", DASHBOARD.read_text()))
            there = {name for name in wanted if name in text}
            panels = len(json.loads(DASHBOARD.read_text())["panels"])
            print(
                f"the dashboard has {panels} panels; {len(there)} of its metrics have numbers now"
            )
            stay(server)
            if share < 0.9 or float(count) != len(asked) or not there:
                sys.exit("that is not what was expected")


if __name__ == "__main__":
    main()
