"""An ensemble that accepts texts: a Python tokenizer and a JAX model; see README.md."""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from serving import served, stay

from xlaserve import export_model
from xlaserve.client import Client

WORDS = HERE.parent / "python_models" / "words"
LENGTH, STEPS, RATE = 8, 200, 1.0
REVIEWS = {
    "the film was good": 1,
    "great film": 1,
    "the film was fine": 1,
    "good good great": 1,
    "the film was bad": 0,
    "poor film": 0,
    "bad bad poor": 0,
    "the film was poor": 0,
}
CONFIG = """
platform: "ensemble"
max_batch_size: 16
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "liked" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling {
  step [
    { model_name: "words" model_version: -1
      input_map { key: "text" value: "text" } output_map { key: "ids" value: "ids" } },
    { model_name: "scores" model_version: -1
      input_map { key: "ids" value: "ids" } output_map { key: "liked" value: "liked" } }
  ]
}
"""


def predict(weights: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the probability that a text is positive, from the weights of its words."""
    return jax.nn.sigmoid(weights[ids].sum(axis=1, keepdims=True))


def trained() -> jax.Array:
    """Return a trained weight for each word in the tokenizer's vocabulary."""
    known = {word: n for n, word in enumerate((WORDS / "1/words.txt").read_text().split(), 2)}
    ids = np.zeros((len(REVIEWS), LENGTH), np.int32)
    for row, text in enumerate(REVIEWS):
        found = [known[word] for word in text.split()]
        ids[row, : len(found)] = found
    wanted = jnp.array(list(REVIEWS.values()), jnp.float32)[:, None]

    def loss(weights: jax.Array) -> jax.Array:
        found = jnp.clip(predict(weights, ids), 1e-6, 1 - 1e-6)
        return -jnp.mean(wanted * jnp.log(found) + (1 - wanted) * jnp.log(1 - found))

    step = jax.jit(lambda weights: weights - RATE * jax.grad(loss)(weights))
    weights = jnp.zeros(len(known) + 2)
    for _ in range(STEPS):
        weights = step(weights)
    return weights


def main() -> None:
    """Train, write three models to a repository, and send texts to the ensemble."""
    with TemporaryDirectory() as folder:
        models = Path(folder)
        shutil.copytree(WORDS, models / "words")
        inputs = {"ids": ("INT32", [-1, LENGTH])}
        export_model(
            predict, trained(), inputs, models / "scores/1", outputs=["liked"], max_batch_size=16
        )
        (models / "review").mkdir()
        (models / "review/config.pbtxt").write_text(CONFIG)
        with served(models, "--allow-python-models") as server:
            texts = np.array([[b"The film was great"], [b"a bad film"]], object)
            with Client(server.grpc) as client:
                liked = client.infer("review", {"text": texts})["liked"][:, 0]
            for text, chance in zip(texts[:, 0], liked, strict=True):
                print(f"{text.decode():20} liked: {chance:.1%}")
            stay(server)
            if liked[0] < 0.9 or liked[1] > 0.1:
                sys.exit("that is not what was expected")


if __name__ == "__main__":
    main()
