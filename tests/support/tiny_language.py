"""A tiny language model in plain JAX, with random parameters."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve import export_generator

VOCAB, HEADS, WIDTH, LAYERS = 32, 2, 8, 2
STOP = 5
LENGTH = 64
SIZE = HEADS * WIDTH


def parameters() -> dict[str, Any]:
    random = np.random.default_rng(7)

    def normal(*shape: int) -> Any:
        return random.normal(0, 0.5, shape).astype(np.float32)

    layer = {"q": (SIZE, SIZE), "k": (SIZE, SIZE), "v": (SIZE, SIZE), "o": (SIZE, SIZE)}
    layers = [{name: normal(*shape) for name, shape in layer.items()} for _ in range(LAYERS)]
    return {
        "embedding": normal(VOCAB, SIZE),
        "position": normal(LENGTH, SIZE),
        "layers": layers,
        "head": normal(SIZE, VOCAB) / 4,
    }


def init_cache(params: Any, slots: int, length: int) -> Any:
    shape = (slots, HEADS, length, WIDTH)
    return [{"k": jnp.zeros(shape), "v": jnp.zeros(shape)} for _ in params["layers"]]


def _attended(query: Any, keys: Any, values: Any, positions: Any) -> Any:
    """Attend from queries [n, heads, width] at positions to keys [n, heads, window, width]."""
    scores = jnp.einsum("nhd,nhwd->nhw", query, keys) / WIDTH**0.5
    seen = jnp.arange(keys.shape[2])[None, None, :] <= positions[:, None, None]
    chances = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("nhw,nhwd->nhd", chances, values).reshape(query.shape[0], SIZE)


def _run(params: Any, cache: Any, window: Any, tokens: Any, positions: Any, slots: Any) -> Any:
    """Write one token per row to its slot, then compute the rows."""
    x = params["embedding"][tokens] + params["position"].at[positions].get(mode="clip")
    following = []
    for layer, before in zip(params["layers"], cache, strict=True):
        q, k, v = ((x @ layer[name]).reshape(-1, HEADS, WIDTH) for name in "qkv")
        # A scatter drops positions beyond the end; a slice would clamp them.
        held = {
            "k": before["k"].at[slots, :, positions].set(k, mode="drop"),
            "v": before["v"].at[slots, :, positions].set(v, mode="drop"),
        }
        keys, values = (held[name][slots, :, : window.shape[0]] for name in "kv")
        x = x + _attended(q, keys, values, positions) @ layer["o"]
        following.append(held)
    return x @ params["head"], following


def decode(params: Any, cache: Any, window: Any, tokens: Any, positions: Any) -> Any:
    return _run(params, cache, window, tokens, positions, jnp.arange(tokens.shape[0]))


def chunk(params: Any, cache: Any, window: Any, tokens: Any, slot: Any, start: Any, n: Any) -> Any:
    positions = start + jnp.arange(tokens.shape[0])
    slots = jnp.full(tokens.shape, slot)
    logits, cache = _run(params, cache, window, tokens, positions, slots)
    return logits[n - 1], cache


def export(path: Path, **changed: Any) -> Path:
    settings = {"vocab": VOCAB, "max_length": LENGTH, "stop_tokens": [STOP], **changed}
    functions = settings.pop("decode", decode), chunk, settings.pop("init_cache", init_cache)
    return export_generator(*functions, parameters(), path, **settings)


def greedy(prompt: list[int], count: int) -> list[int]:
    """Return the expected answer, computed by NumPy from scratch for every token."""
    params, tokens = parameters(), list(prompt)
    while len(tokens) < len(prompt) + count:
        x = params["embedding"][tokens] + params["position"][: len(tokens)]
        unseen = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
        for layer in params["layers"]:
            q, k, v = ((x @ layer[name]).reshape(-1, HEADS, WIDTH).swapaxes(0, 1) for name in "qkv")
            weights = np.exp(q @ k.swapaxes(1, 2) / WIDTH**0.5 + unseen)
            weights /= weights.sum(-1, keepdims=True)
            x = x + (weights @ v).swapaxes(0, 1).reshape(-1, SIZE) @ layer["o"]
        tokens.append(int(np.argmax(x[-1] @ params["head"])))
        if tokens[-1] == STOP:
            break
    return tokens[len(prompt) :]
