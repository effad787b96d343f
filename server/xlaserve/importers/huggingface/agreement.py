"""The agreement of the logits of quantised parameters with those of the parameters before."""

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
    """The logits of both after each of some random tokens, compared."""

    tokens: int
    off: float
    """Root of the mean square of the differences, relative to the spread of the logits."""
    same: float
    """Share of the tokens after which the same one is the likeliest."""


def measure(form: Form, before: Mapping[str, Any], after: Mapping[str, Any]) -> Agreement:
    """Compute the logits of both, always for the same tokens."""
    count = min(_TOKENS, form.max_length)
    tokens = np.random.default_rng(0).integers(0, form.vocab, count, dtype=np.int32)
    program = jax.jit(partial(forward.all_logits, form))
    wanted, found = (np.asarray(program(params, tokens)) for params in (before, after))
    off = float(np.sqrt(np.mean((wanted - found) ** 2)) / wanted.std())
    return Agreement(count, off, float(np.mean(wanted.argmax(-1) == found.argmax(-1))))
