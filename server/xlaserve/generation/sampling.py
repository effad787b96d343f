"""Sampling of the next token of each slot, as part of the exported program."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from xlaserve.runtime.generator.info import WORD_BITS

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
    """How often each token was generated, int32."""
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
    """Return the logits with excluded tokens at minus infinity."""
    # Each limit keeps the likeliest tokens down to some logit. To look for that bit by bit takes a
    # seventh of the time that sorting the vocabulary takes on a CPU.
    order = _ordered(logits)
    count = jnp.where(top_k <= 0, logits.shape[-1], top_k)
    last = _largest_that(lambda at: _sum(order >= at, jnp.int32(1)) >= count, logits.shape[0])
    within = (order > last) | _first(order == last, count - _sum(order > last, jnp.int32(1)))
    chances = jax.nn.softmax(jnp.where(within, logits, -jnp.inf), axis=-1)
    last = _largest_that(lambda at: _sum(order >= at, chances) >= top_p, logits.shape[0])
    is_last = order == last
    # Of tokens that are as likely as the last one, those before whom there is less than top_p.
    one = jnp.max(jnp.where(is_last, chances, 0.0), axis=-1, keepdims=True)
    left = jnp.where(one > 0, jnp.ceil((top_p - _sum(order > last, chances)) / one), 0.0)
    among = jnp.minimum(left, logits.shape[-1]).astype(jnp.int32)
    kept = within & ((order > last) | _first(is_last, among))
    kept &= chances >= min_p * jnp.max(chances, axis=-1, keepdims=True)
    # The likeliest one stays whatever the limits are.
    kept |= jnp.arange(logits.shape[-1], dtype=jnp.int32)[None] == _largest(logits)[:, None]
    # A row without limits is left as it is: rounding of the sum must not change what it draws
    # beside a neighbour that has some.
    return jnp.where(kept | ~limited, logits, -jnp.inf)


def _ordered(logits: jax.Array) -> jax.Array:
    """Return uint32 in the order of the logits."""
    bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest_that(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """Return the largest uint32 [rows, 1] for which something holds that holds for all below it.

    0 where it holds for none.
    """

    def with_bit(index: jax.Array, found: jax.Array) -> jax.Array:
        tried = found | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        return jnp.where(holds(tried), tried, found)

    found: jax.Array = jax.lax.fori_loop(0, 32, with_bit, jnp.zeros((rows, 1), jnp.uint32))
    return found


def _sum(chosen: jax.Array, values: jax.Array) -> jax.Array:
    """Return the sum of chosen values, [rows, 1]."""
    return jnp.sum(jnp.where(chosen, values, values.dtype.type(0)), axis=-1, keepdims=True)


def _first(chosen: jax.Array, count: jax.Array) -> jax.Array:
    """Return the first chosen ones of each row."""
    return chosen & (jnp.cumsum(chosen.astype(jnp.int32), axis=-1) <= count)


def _noise(vocab: int, seed: jax.Array, position: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocab,), jnp.float32)
