"""Compile time of a small program, to check that devices work."""

import time

import numpy as np

_SIZE = 64


def compile_seconds() -> float:
    """Return the seconds to compile and run a small program; JAX must be started. Blocks."""
    import jax

    x = np.ones((_SIZE, _SIZE), np.float32)
    started = time.perf_counter()
    compiled = jax.jit(lambda x: (x @ x).sum()).lower(x).compile()
    compiled(x).block_until_ready()
    return time.perf_counter() - started
