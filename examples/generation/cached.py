"""A cache for models that ask a callback which keys and values to attend to.

Such a model is one function, `logits(params, tokens, at, remember)`: for training `whole` supplies
the callback, for generation `Cached` does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Remember = Callable[[int, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""Takes the keys and values [text, row, head, dim] of a layer, and the layer's number; returns all
keys and values to attend to, [text, head, position, dim].
"""
Logits = Callable[[Any, jax.Array, jax.Array, Remember], jax.Array]
"""Returns [text, row, vocab] for parameters and tokens [text, row] at positions [text, row]."""
Cache = list[dict[str, jax.Array]]


def attended(query: jax.Array, keys: jax.Array, values: jax.Array, at: jax.Array) -> jax.Array:
    """Apply causal attention for queries [text, row, head, dim] at positions [text, row]."""
    scores = jnp.einsum("trhd,thpd->thrp", query, keys) / query.shape[-1] ** 0.5
    seen = jnp.arange(keys.shape[2])[None, None, None] <= at[:, None, :, None]
    chances = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("thrp,thpd->trhd", chances, values)


def whole(logits: Logits, params: Any, tokens: jax.Array) -> jax.Array:
    """Return [text, row, vocab] for whole texts, without a cache."""

    def remember(_: int, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)

    at = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return logits(params, tokens, at, remember)


@dataclass(frozen=True)
class Cached:
    """The three functions that `xlaserve.export_generator` needs, built from `logits`."""

    logits: Logits
    layers: int
    heads: int
    dim: int

    def init_cache(self, params: Any, slots: int, length: int) -> Cache:
        """Return empty keys and values. One array per layer is fast on a CPU."""
        shape = (slots, self.heads, length, self.dim)
        return [{"key": jnp.zeros(shape), "value": jnp.zeros(shape)} for _ in range(self.layers)]

    def decode(self, params: Any, cache: Cache, window: Any, tokens: Any, positions: Any) -> Any:
        """Compute one row for every slot: its token at its position."""
        following = list(cache)

        def remember(layer: int, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
            slots = jnp.arange(tokens.shape[0])
            held = _written(cache[layer], (slots, slice(None), positions), key[:, 0], value[:, 0])
            following[layer] = held
            return held["key"][:, :, : window.shape[0]], held["value"][:, :, : window.shape[0]]

        found = self.logits(params, tokens[:, None], positions[:, None], remember)
        return found[:, 0], following

    def chunk(  # noqa: PLR0917, called by position
        self, params: Any, cache: Cache, window: Any, tokens: Any, slot: Any, start: Any, n: Any
    ) -> Any:
        """Compute rows of one slot, starting at position `start`; only the first n are real."""
        at = start + jnp.arange(tokens.shape[0])
        following = list(cache)

        def remember(layer: int, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
            held = _written(cache[layer], (slot, slice(None), at), key[0], value[0])
            following[layer] = held
            rows = window.shape[0]
            return held["key"][slot, :, :rows][None], held["value"][slot, :, :rows][None]

        found = self.logits(params, tokens[None], at[None], remember)
        return found[0, n - 1], following


def _written(held: dict[str, jax.Array], where: Any, key: Any, value: Any) -> dict[str, jax.Array]:
    # A scatter drops rows past the last position; dynamic_update_slice would clamp them.
    return {
        "key": held["key"].at[where].set(key, mode="drop"),
        "value": held["value"].at[where].set(value, mode="drop"),
    }
