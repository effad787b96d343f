"""Which shapes an import gives the inputs of a model, and whether their first dimension is open."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax
import jax.export

from xlaserve.errors import InvalidModel
from xlaserve.models.onnx.graph import GraphInput
from xlaserve.tensors import TensorSpec

DEFAULT_MAX_BATCH_SIZE = 32
"""Largest batch by default, where all inputs have an open first dimension."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of the imported model."""

    specs: tuple[TensorSpec, ...]
    max_batch_size: int
    """0 where the first dimension is no batch."""

    @property
    def is_open(self) -> bool:
        """Tell whether the first dimension may have any size, be it a batch or not."""
        return bool(self.specs) and self.specs[0].shape[:1] == (-1,)

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the inputs to trace with; the first dimension, if it is open, is symbolic."""
        batch = jax.export.symbolic_shape("b") if self.is_open else ()
        return {
            spec.name: jax.ShapeDtypeStruct(
                (*batch, *spec.shape[len(batch) :]), spec.datatype.dtype
            )
            for spec in self.specs
        }


def resolve(
    inputs: Sequence[GraphInput],
    *,
    shapes: Mapping[str, Sequence[int]],
    dimensions: Mapping[str, int],
    max_batch_size: int | None,
    sizes: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Inputs:
    """Settle every dimension but the first; raises InvalidModel that says what is missing.

    `shapes` replaces those of the model by the names of inputs, with -1 for the batch;
    `dimensions` gives sizes to open dimensions by the names that the model has for them, `sizes` by
    their inputs and places, where it has one.
    """
    _check_known("input", shapes, [item.name for item in inputs])
    names = [size for item in inputs for size in item.shape if isinstance(size, str) and size]
    _check_known("dimension", dimensions, names)
    specs = tuple(
        TensorSpec(item.name, item.datatype, _shape(item, shapes.get(item.name), dimensions))
        for item in (_closed(item, sizes.get(item.name, ())) for item in inputs)
    )
    return Inputs(specs, _batch(specs, max_batch_size))


def _closed(item: GraphInput, sizes: Sequence[int]) -> GraphInput:
    """Return an input with the sizes of a configuration where it is open."""
    if len(sizes) != len(item.shape):
        return item  # the configuration is compared with what is made, and named then
    shape = tuple(
        given if isinstance(size, str) and given > 0 else size
        for size, given in zip(item.shape, sizes, strict=True)
    )
    return replace(item, shape=shape)


def _check_known(kind: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            shown = ", ".join(dict.fromkeys(known)) or "none"
            raise InvalidModel(f"the model has no {kind} '{name}', it has {shown}")


def _shape(
    item: GraphInput, given: Sequence[int] | None, dimensions: Mapping[str, int]
) -> tuple[int, ...]:
    if given is None:
        sizes: list[int | str] = [
            dimensions.get(size, size) if isinstance(size, str) else size for size in item.shape
        ]
    else:
        sizes = list(given)
        if len(sizes) != len(item.shape):
            raise InvalidModel(
                f"input '{item.name}' has {len(item.shape)} dimensions, got {len(sizes)}"
            )
    return tuple(_size(item, axis, size) for axis, size in enumerate(sizes))


def _size(item: GraphInput, axis: int, size: int | str) -> int:
    if isinstance(size, int) and size > 0:
        return size
    if axis == 0:
        return -1
    called = f"'{size}'" if isinstance(size, str) and size else f"number {axis}"
    example = ",".join("-1" if place == 0 else "SIZE" for place in range(len(item.shape)))
    raise InvalidModel(
        f"input '{item.name}': its dimension {called} is open, but only the first may be; give "
        f"its size, with --dim NAME=SIZE or --shape {item.name}={example}, or in the dims of the "
        "configuration that it is served with"
    )


def _batch(specs: Sequence[TensorSpec], asked: int | None) -> int:
    closed = [spec for spec in specs if spec.shape[:1] != (-1,)]
    if len(closed) == len(specs):
        if asked:
            raise InvalidModel(
                f"input '{specs[0].name}' is {specs[0]}, but with max_batch_size {asked} its first "
                "dimension is -1: --shape gives it another shape"
                if specs
                else "the model has no inputs"
            )
        return 0
    if closed:
        raise InvalidModel(
            f"input '{closed[0].name}' is {closed[0]}: either all inputs start with -1 or none "
            "does; --shape gives one another shape"
        )
    return DEFAULT_MAX_BATCH_SIZE if asked is None else asked
