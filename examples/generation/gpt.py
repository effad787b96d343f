"""A small GPT in plain JAX: a dictionary of arrays, and a function of them."""

import jax
import jax.numpy as jnp
import numpy as np
from cached import Cached, Remember, attended

Parameters = dict[str, jax.Array]


def initial(
    vocab: int, length: int, *, width: int = 160, heads: int = 5, layers: int = 4, seed: int = 0
) -> Parameters:
    """Return random parameters, whose shapes determine all sizes."""
    random = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 0.02) -> jax.Array:
        return jnp.asarray(scale * random.standard_normal(shape), jnp.float32)

    dim = width // heads
    # The projections that add to the residual stream start smaller, depending on the depth (GPT-2).
    added = 0.02 / (2 * layers) ** 0.5
    found = {"embedding": normal(vocab, width), "position": normal(length, width)}
    for layer in range(layers):
        found |= {
            f"{layer}/query": normal(width, heads, dim),
            f"{layer}/key": normal(width, heads, dim),
            f"{layer}/value": normal(width, heads, dim),
            f"{layer}/mix": normal(heads, dim, width, scale=added),
            f"{layer}/widen": normal(width, 4 * width),
            f"{layer}/narrow": normal(4 * width, width, scale=added),
            f"{layer}/norm1": jnp.ones(width),
            f"{layer}/norm2": jnp.ones(width),
        }
    return found | {"norm": jnp.ones(width)}


def depth(params: Parameters) -> int:
    """Return the number of layers."""
    return sum(name.endswith("/query") for name in params)


def normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return x with each row scaled to a root mean square of 1, times `scale` (RMSNorm)."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def logits(params: Parameters, tokens: jax.Array, at: jax.Array, remember: Remember) -> jax.Array:
    """Return [text, row, vocab] for tokens [text, row] at positions [text, row]."""
    # A slot without a request is past the last position: clipped here, dropped by the cache.
    x = params["embedding"][tokens] + params["position"].at[at].get(mode="clip")
    for layer in range(depth(params)):
        y = normalised(x, params[f"{layer}/norm1"])
        query, key, value = (
            jnp.einsum("trw,whd->trhd", y, params[f"{layer}/{name}"])
            for name in ("query", "key", "value")
        )
        y = attended(query, *remember(layer, key, value), at)
        x = x + jnp.einsum("trhd,hdw->trw", y, params[f"{layer}/mix"])
        y = jax.nn.gelu(normalised(x, params[f"{layer}/norm2"]) @ params[f"{layer}/widen"])
        x = x + y @ params[f"{layer}/narrow"]
    return normalised(x, params["norm"]) @ params["embedding"].T


def cached(params: Parameters) -> Cached:
    """Return the functions for generation."""
    _, heads, dim = params["0/key"].shape
    return Cached(logits, depth(params), heads, dim)
