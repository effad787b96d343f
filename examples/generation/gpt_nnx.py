"""The same GPT as a Flax NNX module, with random parameters, exported to serve.

python examples/generation/gpt_nnx.py models/nnx/1
"""

import sys
from pathlib import Path

import jax
from cached import Cached, Remember, attended
from flax import nnx

from xlaserve import export_generator


class Layer(nnx.Module):
    """Attention and two dense layers, each added to its input."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.shape = (heads, width // heads)
        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.query = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.mix = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.widen = nnx.Linear(width, 4 * width, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, at: jax.Array, number: int, remember: Remember) -> jax.Array:
        """Apply the layer to rows [text, row, width]."""
        y = self.norm1(x)
        query, key, value = (
            project(y).reshape(*y.shape[:2], *self.shape)
            for project in (self.query, self.key, self.value)
        )
        y = attended(query, *remember(number, key, value), at)
        x = x + self.mix(y.reshape(x.shape))
        return x + self.narrow(nnx.gelu(self.widen(self.norm2(x))))


class GPT(nnx.Module):
    """A language model; the embedding also gives the logits."""

    def __init__(
        self,
        vocab: int,
        length: int,
        *,
        width: int = 160,
        heads: int = 5,
        layers: int = 4,
        rngs: nnx.Rngs,
    ) -> None:
        self.embedding = nnx.Embed(vocab, width, rngs=rngs)
        self.position = nnx.Param(0.02 * rngs.params.normal((length, width)))
        self.layers = nnx.List(Layer(width, heads, rngs) for _ in range(layers))
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array, at: jax.Array, remember: Remember) -> jax.Array:
        """Return [text, row, vocab] for tokens [text, row] at positions [text, row]."""
        x = self.embedding(tokens) + self.position[...].at[at].get(mode="clip")
        for number, layer in enumerate(self.layers):
            x = layer(x, at, number, remember)
        return self.embedding.attend(self.norm(x))


def export(model: GPT, version: Path, *, stop_tokens: list[int]) -> Path:
    """Export a model: its state becomes the parameters, its definition part of the programs."""
    definition, state = nnx.split(model)

    def logits(state: nnx.State, tokens: jax.Array, at: jax.Array, remember: Remember) -> jax.Array:
        return nnx.merge(definition, state)(tokens, at, remember)

    functions = Cached(logits, len(model.layers), *model.layers[0].shape)
    return export_generator(
        functions.decode,
        functions.chunk,
        functions.init_cache,
        state,
        version,
        vocab=model.embedding.num_embeddings,
        max_length=model.position.shape[0],
        stop_tokens=stop_tokens,
        overwrite=True,
    )


if __name__ == "__main__":
    print(export(GPT(1024, 256, rngs=nnx.Rngs(0)), Path(sys.argv[1]), stop_tokens=[0]))
