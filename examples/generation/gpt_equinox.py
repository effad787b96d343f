"""The same GPT as an Equinox module, with random parameters, exported to serve.

python examples/generation/gpt_equinox.py models/equinox/1
"""

import sys
from pathlib import Path

import equinox as eqx
import jax
from cached import Cached, Remember, attended

from xlaserve import export_generator


class Layer(eqx.Module):
    """Attention and two dense layers, each added to its input."""

    heads: int = eqx.field(static=True)
    norm1: eqx.nn.RMSNorm
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    mix: eqx.nn.Linear
    norm2: eqx.nn.RMSNorm
    widen: eqx.nn.Linear
    narrow: eqx.nn.Linear

    def __init__(self, width: int, heads: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 6)
        self.heads = heads
        self.norm1 = eqx.nn.RMSNorm(width, use_bias=False)
        self.query, self.key, self.value, self.mix = (
            eqx.nn.Linear(width, width, use_bias=False, key=one) for one in keys[:4]
        )
        self.norm2 = eqx.nn.RMSNorm(width, use_bias=False)
        self.widen = eqx.nn.Linear(width, 4 * width, key=keys[4])
        self.narrow = eqx.nn.Linear(4 * width, width, key=keys[5])

    def __call__(self, x: jax.Array, at: jax.Array, number: int, remember: Remember) -> jax.Array:
        """Apply the layer to rows [text, row, width]."""
        y = rows(self.norm1)(x)
        query, key, value = (
            rows(project)(y).reshape(*y.shape[:2], self.heads, -1)
            for project in (self.query, self.key, self.value)
        )
        y = attended(query, *remember(number, key, value), at)
        x = x + rows(self.mix)(y.reshape(x.shape))
        return x + rows(lambda row: self.narrow(jax.nn.gelu(self.widen(self.norm2(row)))))(x)


class GPT(eqx.Module):
    """A language model; the embedding also gives the logits."""

    embedding: eqx.nn.Embedding
    position: jax.Array
    layers: list[Layer]
    norm: eqx.nn.RMSNorm

    def __init__(
        self,
        vocab: int,
        length: int,
        *,
        width: int = 160,
        heads: int = 5,
        layers: int = 4,
        key: jax.Array,
    ) -> None:
        keys = jax.random.split(key, layers + 2)
        # Small, as in GPT-2: with large values every token would predict itself.
        scaled = 0.02 * jax.random.normal(keys[0], (vocab, width))
        self.embedding = eqx.nn.Embedding(weight=scaled)
        self.position = 0.02 * jax.random.normal(keys[1], (length, width))
        self.layers = [Layer(width, heads, one) for one in keys[2:]]
        self.norm = eqx.nn.RMSNorm(width, use_bias=False)

    def __call__(self, tokens: jax.Array, at: jax.Array, remember: Remember) -> jax.Array:
        """Return [text, row, vocab] for tokens [text, row] at positions [text, row]."""
        x = rows(self.embedding)(tokens) + self.position.at[at].get(mode="clip")
        for number, layer in enumerate(self.layers):
            x = layer(x, at, number, remember)
        return rows(self.norm)(x) @ self.embedding.weight.T


def rows(layer):
    """Vectorise a layer for one row over [text, row]."""
    return jax.vmap(jax.vmap(layer))


def export(model: GPT, version: Path, *, stop_tokens: list[int]) -> Path:
    """Export a model: its arrays become the parameters, the rest becomes part of the programs."""
    params, static = eqx.partition(model, eqx.is_array)

    def logits(params: GPT, tokens: jax.Array, at: jax.Array, remember: Remember) -> jax.Array:
        return eqx.combine(params, static)(tokens, at, remember)

    width = model.position.shape[1]
    heads = model.layers[0].heads
    functions = Cached(logits, len(model.layers), heads, width // heads)
    return export_generator(
        functions.decode,
        functions.chunk,
        functions.init_cache,
        params,
        version,
        vocab=model.embedding.num_embeddings,
        max_length=model.position.shape[0],
        stop_tokens=stop_tokens,
        overwrite=True,
    )


if __name__ == "__main__":
    print(export(GPT(1024, 256, key=jax.random.key(0)), Path(sys.argv[1]), stop_tokens=[0]))
