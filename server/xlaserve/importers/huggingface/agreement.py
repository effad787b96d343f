"""Compares the logits of quantised parameters with those of the original parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from xlaserve.importers.huggingface import forward
from xlaserve.importers.huggingface.form import Form

_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the logits of the original and the quantised parameters agree."""

    tokens: int
    off: float
    """Root mean square difference, divided by the standard deviation of the original logits."""
    same: float
    """Fraction of the tokens for which original and quantised parameters predict the same next
    token."""


def measure(form: Form, before: Mapping[str, Any], after: Mapping[str, Any]) -> Agreement:
    """Compare both sets of parameters on the same pseudorandom tokens (fixed seed)."""
    count = min(_TOKENS, form.max_length)
    tokens = np.random.default_rng(0).integers(0, form.vocab, count, dtype=np.int32)
    program = jax.jit(partial(forward.all_logits, form))
    wanted, found = (np.asarray(program(params, tokens)) for params in (before, after))
    off = float(np.sqrt(np.mean((wanted - found) ** 2)) / wanted.std())
    return Agreement(count, off, float(np.mean(wanted.argmax(-1) == found.argmax(-1))))
