"""Sampling of each slot's next token, traced into the exported program."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from xlaserve.runtime.generator.info import WORD_BITS

TOP = 20
"""Number of most likely tokens that a step returns; clients may ask for up to this many."""

INTEGERS = ("token", "position", "is_active", "top_k", "may_stop", "seed_high", "seed_low")
"""Columns of the integer parameters of each slot."""
REALS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
"""Columns of the real parameters of each slot."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Per-slot tables of a request's history and options.

    All have the shape [slots, vocab], except the mask.
    """

    counts: jax.Array
    """Number of times each token was generated, int32."""
    prompt: jax.Array
    """int8 flags: 1 for each token that occurs in the prompt."""
    bias: jax.Array
    """Added to the logits, float32."""
    mask: jax.Array
    """One bit per token, int32[slots, mask_words(vocab)]; tokens with bit 0 are never sampled."""


def sample(
    logits: jax.Array,
    tables: Tables,
    integers: jax.Array,
    reals: jax.Array,
    stop_tokens: tuple[int, ...],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return token, its log-probability, and the most likely tokens with theirs, for each slot.

    Rows are independent: other requests do not change a token. The random key depends only on seed
    and position, so a request with a seed is reproducible in any slot. Log-probabilities are the
    model's own, before penalties and temperature.
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
    # Noise for every token costs more than everything above, so it is skipped if all rows are
    # greedy.
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
    """Return the index of each row's maximum, int32; the first one in case of ties.

    Uses two reductions with one operand, which XLA vectorizes on a CPU, unlike `argmax`.
    """
    last = logits.shape[-1] - 1
    is_largest = logits == jnp.max(logits, axis=-1, keepdims=True)
    places = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None]
    return jnp.min(jnp.where(is_largest, places, last), axis=-1)


def _noisy(
    changed: jax.Array, number: dict[str, jax.Array], real: dict[str, jax.Array], greedy: jax.Array
) -> jax.Array:
    """Return noisy logits whose maximum is a sample from each row (the Gumbel-max trick)."""
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
    """Set the logits of tokens excluded by top_k, top_p or min_p to minus infinity."""
    # Each limit keeps the tokens above some threshold. Finding it by binary search over the bits
    # takes a seventh of the time of sorting the vocabulary on a CPU.
    order = _ordered(logits)
    count = jnp.where(top_k <= 0, logits.shape[-1], top_k)
    last = _largest_that(lambda at: _sum(order >= at, jnp.int32(1)) >= count, logits.shape[0])
    within = (order > last) | _first(order == last, count - _sum(order > last, jnp.int32(1)))
    chances = jax.nn.softmax(jnp.where(within, logits, -jnp.inf), axis=-1)
    last = _largest_that(lambda at: _sum(order >= at, chances) >= top_p, logits.shape[0])
    is_last = order == last
    # Among ties with the last token, keep the first ones until their sum reaches top_p.
    one = jnp.max(jnp.where(is_last, chances, 0.0), axis=-1, keepdims=True)
    left = jnp.where(one > 0, jnp.ceil((top_p - _sum(order > last, chances)) / one), 0.0)
    among = jnp.minimum(left, logits.shape[-1]).astype(jnp.int32)
    kept = within & ((order > last) | _first(is_last, among))
    kept &= chances >= min_p * jnp.max(chances, axis=-1, keepdims=True)
    # Always keep the most likely token.
    kept |= jnp.arange(logits.shape[-1], dtype=jnp.int32)[None] == _largest(logits)[:, None]
    # Leave rows without limits unchanged: rounding must not make their tokens depend on whether
    # other rows have limits.
    return jnp.where(kept | ~limited, logits, -jnp.inf)


def _ordered(logits: jax.Array) -> jax.Array:
    """Map logits to uint32 with the same order."""
    bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest_that(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """Return the largest uint32 [rows, 1] for which a monotonic condition holds, or 0."""

    def with_bit(index: jax.Array, found: jax.Array) -> jax.Array:
        tried = found | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        return jnp.where(holds(tried), tried, found)

    found: jax.Array = jax.lax.fori_loop(0, 32, with_bit, jnp.zeros((rows, 1), jnp.uint32))
    return found


def _sum(chosen: jax.Array, values: jax.Array) -> jax.Array:
    """Return the sum of the chosen values, [rows, 1]."""
    return jnp.sum(jnp.where(chosen, values, values.dtype.type(0)), axis=-1, keepdims=True)


def _first(chosen: jax.Array, count: jax.Array) -> jax.Array:
    """Keep only the first `count` chosen elements of each row."""
    return chosen & (jnp.cumsum(chosen.astype(jnp.int32), axis=-1) <= count)


def _noise(vocab: int, seed: jax.Array, position: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocab,), jnp.float32)
