"""Memory and executables that models hold in this process, per the ledger and per JAX."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import gc
from dataclasses import dataclass

import jax

from xlaserve.app.server import Application


@dataclass(frozen=True, slots=True)
class Held:
    """Equal before and after a test if nothing leaked."""

    booked_bytes: int
    buffers_bytes: int
    executables: int


def held(application: Application, *, collect: bool = True) -> Held:
    """Count, optionally after a garbage collection.

    First clears JAX's caches: they hold executables of the tests' own computations, and the
    server empties them from time to time as well.
    """
    if collect:
        jax.clear_caches()
        gc.collect()
    return Held(
        application.capacity.used_bytes,
        sum(array.nbytes for array in jax.live_arrays()),
        len(jax.devices()[0].client.live_executables()),
    )
