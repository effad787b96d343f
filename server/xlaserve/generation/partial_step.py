"""A decoding step of fewer rows than slots: gathers their cache, writes new rows back.

`decode` leaves the number of slots and of positions open, so that it can be called for a smaller
cache: that of the slots which take part, as far as the window. XLA keeps the whole cache in place
only if nothing reads it after the first write, which `PartialStep` makes sure of.
"""

# Much of jax is typed, but not all that is called here.
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
    """The function of a step that computes some of the slots."""

    decode: Callable[..., Any]
    axes: tuple[int | None, ...]
    """Position of the positions axis of each array of the cache, or None."""
    window: int
    keeps_rows: bool
    """Whether `decode` changes the row of the position alone: one that does not have rows kept for
    other prompts may overwrite others too, and all that it was given are written back."""

    def __call__(  # noqa: PLR0917, the order of the arguments of `decode`
        self,
        parameters: list[jax.Array],
        cache: list[jax.Array],
        counts: jax.Array,
        tables: Sequence[jax.Array],
        slots: jax.Array,
        others: Sequence[jax.Array],
    ) -> tuple[Any, ...]:
        """Return what `decode` does: a row for each of the slots, the cache, and the counts.

        `tables` are prompts and biases of all slots. `slots` is int32[k]; a number that no slot has
        is padding, whose row is dropped. `others` are the window, integers, reals and mask of
        `decode`, with k rows.
        """
        integers = others[1]
        pairs = list(zip(cache, self.axes, strict=True))
        gathered = [_gathered(array, axis, self.window, slots) for array, axis in pairs]
        rows = [table.at[slots].get(mode="clip") for table in (counts, *tables)]
        *found, following, _ = self.decode(parameters, gathered, *rows, *others)
        # No token is negative, which XLA does not know: all reads of the cache come before its
        # first write. Without that, XLA copied half of it for a step of one row.
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
        """Return an array of the cache with its changes written back."""
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
    """Return the rows of some slots in an array of the cache, as far as the window."""
    if axis is not None:
        array = jax.lax.slice_in_dim(array, 0, window, axis=axis)
    return array.at[slots].get(mode="clip")
