"""Export a Flax NNX module: its state becomes the parameters, its definition becomes the program.

python examples/flax_nnx.py models/nnx/1
xlaserve export examples/flax_nnx.py:model models/nnx
"""

import sys

import jax
from flax import nnx

from xlaserve import Exportable


class Classifier(nnx.Module):
    """Two dense layers, a BatchNorm with statistics, and a Dropout with a random key."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(32, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.scores = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, features: jax.Array) -> jax.Array:
        """Return ten scores for each row of features."""
        hidden = self.dropout(nnx.relu(self.norm(self.hidden(features))))
        return self.scores(hidden)


def model() -> Exportable:
    """Return the model in evaluation mode: fixed statistics, no dropout."""
    classifier = Classifier(nnx.Rngs(0))
    classifier.eval()
    definition, state = nnx.split(classifier)

    def predict(state: nnx.State, features: jax.Array) -> jax.Array:
        return nnx.merge(definition, state)(features)

    return Exportable(predict, state, {"features": ("FP32", [-1, 32])}, outputs=["scores"])


if __name__ == "__main__":
    print(model().write(sys.argv[1]))
