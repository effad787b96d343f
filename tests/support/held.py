"""What models hold in this process, by the books and by JAX."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

import gc
from dataclasses import dataclass

import jax

from xlaserve.app.server import Application


@dataclass(frozen=True, slots=True)
class Held:
    """Equal before and after if nothing was left behind."""

    booked_bytes: int
    buffers_bytes: int
    executables: int


def held(application: Application, *, collect: bool = True) -> Held:
    """Count, after a collection if it is asked for.

    What the tests themselves computed with JAX goes first: its caches hold executables too, and
    the server empties them from time to time.
    """
    if collect:
        jax.clear_caches()
        gc.collect()
    return Held(
        application.capacity.used_bytes,
        sum(array.nbytes for array in jax.live_arrays()),
        len(jax.devices()[0].client.live_executables()),
    )
