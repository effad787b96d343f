"""Partial decoding steps, for fewer rows than slots: gather their cache, write back new rows.

`decode` has symbolic dimensions for slots and positions, so it can be called on a smaller cache:
that of the participating slots, up to the window. XLA updates the whole cache in place only if
nothing reads it after the first write, which `PartialStep` ensures.
"""

# Some jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from xlaserve.generation.sampling import INTEGERS

_POSITION, _ACTIVE = INTEGERS.index("position"), INTEGERS.index("is_active")


@dataclass(frozen=True)
class PartialStep:
    """A decoding step for some of the slots."""

    decode: Callable[..., Any]
    axes: tuple[int | None, ...]
    """Axis of the positions in each cache array, or None."""
    window: int
    keeps_rows: bool
    """Whether `decode` only changes the row of the current position. Models that do not allow
    prefix reuse may change other rows too, so all gathered rows are written back.
    """

    def __call__(  # noqa: PLR0917, the order of the arguments of `decode`
        self,
        parameters: list[jax.Array],
        cache: list[jax.Array],
        counts: jax.Array,
        tables: Sequence[jax.Array],
        slots: jax.Array,
        others: Sequence[jax.Array],
    ) -> tuple[Any, ...]:
        """Run `decode`; return its results (a row per slot), the cache, and the counts.

        `tables` are prompts and biases of all slots. `slots` is int32[k]; numbers beyond the last
        slot are padding, whose rows are dropped. `others` are window, integers, reals and mask of
        `decode`, with k rows.
        """
        integers = others[1]
        pairs = list(zip(cache, self.axes, strict=True))
        gathered = [_gathered(array, axis, self.window, slots) for array, axis in pairs]
        rows = [table.at[slots].get(mode="clip") for table in (counts, *tables)]
        *found, following, _ = self.decode(parameters, gathered, *rows, *others)
        # Makes the first write depend on the tokens, and thereby on all reads of the cache: XLA
        # does not know that tokens are never negative. Without this, XLA copied half of the cache
        # in a step of one row.
        targets = jnp.where(found[0] < 0, counts.shape[0], slots)
        positions = integers[:, _POSITION]
        written = [
            self._written(array, new, axis, targets, positions)
            for (array, axis), new in zip(pairs, following, strict=True)
        ]
        counted = counts.at[targets, found[0]].add(integers[:, _ACTIVE], mode="drop")
        return (*found, written, counted)

    def _written(
        self,
        array: jax.Array,
        new: jax.Array,
        axis: int | None,
        slots: jax.Array,
        positions: jax.Array,
    ) -> jax.Array:
        """Write the changed rows of a cache array back."""
        if axis is None:
            return array.at[slots].set(new, mode="drop")
        at: list[Any] = [slots, *[slice(None)] * (array.ndim - 1)]
        if not self.keeps_rows:
            at[axis] = slice(0, self.window)
            return array.at[tuple(at)].set(new, mode="drop")
        picked = positions.reshape(-1, *[1] * (new.ndim - 1))
        rows = jnp.take_along_axis(new, picked, axis, mode="clip").squeeze(axis)
        at[axis] = positions
        return array.at[tuple(at)].set(rows, mode="drop")


def _gathered(array: jax.Array, axis: int | None, window: int, slots: jax.Array) -> jax.Array:
    """Gather the rows of some slots in a cache array, up to the window."""
    if axis is not None:
        array = jax.lax.slice_in_dim(array, 0, window, axis=axis)
    return array.at[slots].get(mode="clip")
