"""Memory shared between tensors, so that in-place changes are visible in all views.

Programs of torch.export keep in-place operators (`relu_`, `add_`) and views (`slice`, `select`)
unless `run_decompositions` removed them. Here a storage holds a value, and a view is a chain of
steps from that value to the view's own value, and back for writes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2.operators.indexing import where_of
from xlaserve.importers.pt2.operators.shape import part_sizes
from xlaserve.importers.pt2.values import axes_of, axis_of

_DECOMPOSE = "export it again with ep = ep.run_decompositions({}) before torch.export.save"


@dataclass(slots=True, eq=False)
class Storage:
    """Memory whose value in-place operators replace."""

    value: jax.Array
    owner: str = ""
    """Description of the input or parameter that owns the memory; empty if there is none."""
    version: int = 0
    related: list["Storage"] = field(default_factory=list)
    """Storages that may be the same memory in PyTorch, depending on strides."""
    changed_by: str = ""
    """The node that changed a related storage, so that this value may be outdated."""


@dataclass(frozen=True, slots=True)
class Step:
    """One view of a base value."""

    forward: Callable[[jax.Array], jax.Array]
    write: Callable[[jax.Array, jax.Array], jax.Array] | None
    """Returns the base with the view's new value written to it; None if the view is not writable.
    """


class Reference:
    """A tensor of a program: a storage, and the views that lead to the tensor."""

    __slots__ = ("_seen", "_value", "steps", "storage")

    def __init__(self, storage: Storage, steps: Sequence[Step] = ()) -> None:
        self.storage = storage
        self.steps = tuple(steps)
        self._value = storage.value
        self._seen = -1 if steps else storage.version

    @classmethod
    def fresh(cls, value: jax.Array, owner: str = "") -> "Reference":
        """Return a tensor that owns its memory."""
        return cls(Storage(value, owner))

    def read(self) -> jax.Array:
        """Return the current value; raises InvalidModel if it may be outdated."""
        if self.storage.changed_by:
            raise InvalidModel(
                f"it reads a tensor that may alias one that {self.storage.changed_by} changes in"
                f" place: {_DECOMPOSE}"
            )
        if self._seen != self.storage.version:
            value = self.storage.value
            for step in self.steps:
                value = step.forward(value)
            self._value, self._seen = value, self.storage.version
        return self._value

    def view(self, step: Step, value: jax.Array) -> "Reference":
        """Return a view with a known value."""
        made = Reference(self.storage, (*self.steps, step))
        made._value, made._seen = value, self.storage.version
        return made

    def copy(self, value: jax.Array) -> "Reference":
        """Return a result that is a view or a copy in PyTorch, depending on strides."""
        storage = Storage(value, related=self.storage.related)
        if not self.storage.related:
            self.storage.related.append(self.storage)
        self.storage.related.append(storage)
        return Reference(storage)

    def write(self, value: jax.Array, node: object) -> None:
        """Change the tensor in place.

        Raises InvalidModel for inputs and parameters, and for views that cannot be written.
        """
        storage = self.storage
        if storage.owner:
            raise InvalidModel(
                f"it changes {storage.owner} in place, but a served model keeps no state between"
                " requests"
            )
        bases = [storage.value]
        for step in self.steps:
            bases.append(step.forward(bases[-1]))
        for step, base in zip(reversed(self.steps), reversed(bases[:-1]), strict=True):
            if step.write is None:
                raise InvalidModel(f"it changes an expanded view in place: {_DECOMPOSE}")
            value = step.write(base, value)
        storage.value = value
        storage.version += 1
        for other in storage.related:
            if other is not storage:
                other.changed_by = str(node)


# --- Views -------------------------------------------------------------------------------------

Arguments = Mapping[str, Any]


def _reshaped(base: jax.Array, new: jax.Array, _: Arguments) -> jax.Array:
    return new.reshape(base.shape)


def _permuted(base: jax.Array, new: jax.Array, arguments: Arguments) -> jax.Array:
    order = axes_of(tuple(arguments["dims"]), base.ndim)
    return jnp.transpose(new, sorted(range(base.ndim), key=order.__getitem__))


def _swapped(base: jax.Array, new: jax.Array, arguments: Arguments) -> jax.Array:
    axes = [value for name, value in arguments.items() if name != "self"]
    if not base.ndim:
        return new
    return jnp.swapaxes(new, *(axis_of(axis, base.ndim) for axis in axes))


def _turned(base: jax.Array, new: jax.Array, _: Arguments) -> jax.Array:
    return new.T


def _sliced(base: jax.Array, new: jax.Array, arguments: Arguments) -> jax.Array:
    given = {"dim": 0, "start": None, "end": None, "step": 1, **arguments}
    place = where_of(base.shape, given["dim"], given["start"], given["end"], given["step"])
    return base.at[place].set(new)


def _narrowed(base: jax.Array, new: jax.Array, arguments: Arguments) -> jax.Array:
    return _part(base, new, arguments["dim"], arguments["start"], arguments["length"])


def _selected(base: jax.Array, new: jax.Array, arguments: Arguments) -> jax.Array:
    axis = axis_of(arguments["dim"], base.ndim)
    return base.at[(*[slice(None)] * axis, arguments["index"])].set(new)


def _whole(base: jax.Array, new: jax.Array, _: Arguments) -> jax.Array:
    return new


def _part(base: jax.Array, new: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    axis = axis_of(dim, base.ndim)
    return base.at[(*[slice(None)] * axis, slice(start, start + length))].set(new)


_Write = Callable[[jax.Array, jax.Array, Arguments], jax.Array]

_VIEWS: Mapping[str, _Write | None] = MappingProxyType(
    {
        "alias": _whole,
        "detach": _whole,
        "diagonal": None,
        "dropout": _whole,
        "expand": None,
        "expand_as": None,
        "feature_dropout": _whole,
        "narrow": _narrowed,
        "numpy_T": _turned,
        "permute": _permuted,
        "select": _selected,
        "slice": _sliced,
        "squeeze": _reshaped,
        "swapaxes": _swapped,
        "swapdims": _swapped,
        "t": _turned,
        "transpose": _swapped,
        "unflatten": _reshaped,
        "unfold": None,
        "unsqueeze": _reshaped,
        "view": _reshaped,
        "view_as": _reshaped,
    }
)
"""Operators whose result is always a view of their first argument, with the function that writes to
it; None if the view is not writable."""

_SPLITS = frozenset({"chunk", "split", "split_with_sizes", "unbind"})
"""Operators whose results are parts of their first argument."""

_MAYBE = frozenset(
    {
        "_reshape_alias",
        "broadcast_tensors",
        "contiguous",
        "flatten",
        "meshgrid",
        "movedim",
        "reshape",
        "to",
        "type_as",
    }
)
"""Operators whose result is either a view or a copy."""


def is_in_place(name: str) -> bool:
    """Tell whether an operator changes its first argument: `relu_`, but not `__and__`."""
    return name.endswith("_") and not name.endswith("__")


def referred(
    name: str,
    source: Reference | None,
    arguments: Arguments,
    result: jax.Array | Sequence[jax.Array],
    compute: Callable[[jax.Array], Any],
) -> Reference | list[Reference]:
    """Wrap the results of an operator as tensors that share memory as in PyTorch.

    `source` is the first argument if it is a tensor; `compute` recomputes the result for another
    value of `source`.
    """
    if isinstance(result, jax.Array):
        if source is not None and name in _VIEWS:
            write = _VIEWS[name]
            step = Step(compute, write and partial(_write, write, arguments))
            return source.view(step, result)
        if source is not None and name in _MAYBE:
            return source.copy(result)
        return Reference.fresh(result)
    if source is not None and name in _SPLITS:
        return _parts(name, source, arguments, result)
    if source is not None and name in _MAYBE:
        return [source.copy(value) for value in result]
    return [Reference.fresh(value) for value in result]


def _write(write: _Write, arguments: Arguments, base: jax.Array, new: jax.Array) -> jax.Array:
    return write(base, new, arguments)


def _parts(
    name: str, source: Reference, arguments: Arguments, values: Sequence[jax.Array]
) -> list[Reference]:
    base = source.read()
    dim = arguments.get("dim", 0)
    sizes = part_sizes(name, base.shape[axis_of(dim, base.ndim)], dict(arguments))
    found, start = [], 0
    for value, size in zip(values, sizes, strict=True):
        part = _Part(name == "unbind", dim, start, size)
        step = Step(part.read, part.written)
        found.append(source.view(step, value))
        start += size
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    is_one: bool
    """Whether the dimension is removed, as `unbind` does."""
    dim: int
    start: int
    size: int

    def read(self, base: jax.Array) -> jax.Array:
        axis = axis_of(self.dim, base.ndim)
        part = jax.lax.slice_in_dim(base, self.start, self.start + self.size, axis=axis)
        return jnp.squeeze(part, axis) if self.is_one else part

    def written(self, base: jax.Array, new: jax.Array) -> jax.Array:
        axis = axis_of(self.dim, base.ndim)
        part = jnp.expand_dims(new, axis) if self.is_one else new
        return _part(base, part, self.dim, self.start, self.size)
