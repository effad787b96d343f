"""The choice of the next token of each slot, as a part of the exported program."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from xlaserve.models.generation.info import WORD_BITS

TOP = 20
"""The most likely tokens that a step reports, at most: a client asks for that many or fewer."""

INTEGERS = ("token", "position", "is_active", "top_k", "may_stop", "seed_high", "seed_low")
"""Columns of the integers of each slot."""
REALS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
"""Columns of the reals of each slot."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Arrays with a row for what the request in each slot asks and has seen.

    They are [slots, vocab], but for the mask.
    """

    counts: jax.Array
    """The times that each token was generated, int32."""
    prompt: jax.Array
    """1 for each token of the prompt, int8."""
    bias: jax.Array
    """Added to the logits, float32."""
    mask: jax.Array
    """A bit for each token, int32[slots, mask_words(vocab)]: one whose bit is 0 is not drawn."""


def sample(
    logits: jax.Array,
    tables: Tables,
    integers: jax.Array,
    reals: jax.Array,
    stop_tokens: tuple[int, ...],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return token, its log-probability, and the most likely tokens with theirs, for each slot.

    A row is computed from itself alone: neighbours change no token. The random key is a function
    of the seed and the position, so that a request with a seed repeats itself in any slot. The
    log-probabilities are the model's own, before penalties and temperature.
    """
    number = {name: integers[:, index] for index, name in enumerate(INTEGERS)}
    real = {name: reals[:, index, None] for index, name in enumerate(REALS)}
    logits = logits.astype(jnp.float32)
    own = jax.nn.log_softmax(logits, axis=-1)
    top_logprobs, top_tokens = jax.lax.top_k(own, min(TOP, own.shape[-1]))
    changed = _penalised(logits, tables, real) + tables.bias
    changed = jnp.where(_allowed(tables.mask, changed.shape[-1]), changed, -jnp.inf)
    if stop_tokens:
        held = jnp.zeros(changed.shape[-1], bool).at[jnp.asarray(stop_tokens)].set(True)
        changed = jnp.where(held[None] & (number["may_stop"] == 0)[:, None], -jnp.inf, changed)
    greedy = real["temperature"] <= 0
    # Noise for every token of every row is dearer than all that is above: a step in which nobody
    # draws has none.
    token = jax.lax.cond(
        jnp.all(greedy),
        lambda: _largest(changed),
        lambda: _largest(jnp.where(greedy, changed, _noisy(changed, number, real, greedy))),
    )
    logprob = jnp.take_along_axis(own, token[:, None], axis=-1)[:, 0]
    return token, logprob, top_tokens.astype(jnp.int32), top_logprobs


def _allowed(mask: jax.Array, vocab: int) -> jax.Array:
    bits = (mask[:, :, None] >> jnp.arange(WORD_BITS)[None, None]) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab] > 0


def _penalised(logits: jax.Array, tables: Tables, real: dict[str, jax.Array]) -> jax.Array:
    generated = tables.counts > 0
    seen = generated | (tables.prompt > 0)
    repetition = real["repetition"]
    weaker = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, weaker, logits)
    counts = tables.counts.astype(jnp.float32)
    return logits - real["presence"] * generated.astype(jnp.float32) - real["frequency"] * counts


def _largest(logits: jax.Array) -> jax.Array:
    """Return where each row is largest, int32: the first place of several.

    Two reductions of one operand: XLA vectorises them on a CPU, and not that of `argmax`.
    """
    last = logits.shape[-1] - 1
    is_largest = logits == jnp.max(logits, axis=-1, keepdims=True)
    places = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None]
    return jnp.min(jnp.where(is_largest, places, last), axis=-1)


def _noisy(
    changed: jax.Array, number: dict[str, jax.Array], real: dict[str, jax.Array], greedy: jax.Array
) -> jax.Array:
    """Return logits whose largest is a draw from those of each row (the Gumbel-max trick)."""
    scaled = changed / jnp.where(greedy, 1.0, real["temperature"])
    top_k = number["top_k"][:, None]
    limited = (top_k > 0) | (real["top_p"] < 1) | (real["min_p"] > 0)
    kept = jax.lax.cond(
        jnp.any(limited & ~greedy),
        lambda: _likely(scaled, top_k, real["top_p"], real["min_p"], limited),
        lambda: scaled,
    )
    seeds = jnp.stack([number["seed_high"], number["seed_low"]], axis=-1)
    seeds = jax.lax.bitcast_convert_type(seeds, jnp.uint32)
    noise = jax.vmap(partial(_noise, kept.shape[-1]))
    found: jax.Array = kept + noise(seeds, number["position"])
    return found


def _likely(
    logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array, limited: jax.Array
) -> jax.Array:
    """Return the logits with those at minus infinity that are not to be drawn."""
    order = jnp.argsort(-logits, axis=-1)
    ordered = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(logits.shape[-1])[None, :]
    within = (top_k <= 0) | (rank < top_k)
    chances = jax.nn.softmax(jnp.where(within, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(chances, axis=-1) - chances
    # The likeliest one stays whatever the limits are.
    kept = (within & (before < top_p) & (chances >= min_p * chances[:, :1])) | (rank == 0)
    rows = jnp.arange(logits.shape[0])[:, None]
    mask = jnp.zeros(logits.shape, bool).at[rows, order].set(kept)
    # A row without limits is left as it is: rounding of the sum must not change what it draws
    # beside a neighbour that has some.
    return jnp.where(mask | ~limited, logits, -jnp.inf)


def _noise(vocab: int, seed: jax.Array, position: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocab,), jnp.float32)
