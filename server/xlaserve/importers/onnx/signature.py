"""Resolves the input shapes of an import and its batch dimension."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import jax

from xlaserve.artifact.artifact import BATCH_DIMENSION
from xlaserve.authoring.lowering import OpenShapes
from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import GraphInput
from xlaserve.tensors import Tensor, TensorSpec

DEFAULT_MAX_BATCH_SIZE = 32
"""Default batch limit, if all inputs have a dynamic first dimension."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of the imported model."""

    specs: tuple[TensorSpec, ...]
    """Input specifications, with -1 for dynamic dimensions."""
    max_batch_size: int
    """Largest batch; 0 without a batch dimension."""
    named: tuple[tuple[int | str, ...], ...] = ()
    """The input shapes with names for dynamic dimensions other than the batch; empty if there are
    none."""
    compiled: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Sizes to compile programs for, by name of the dynamic dimension."""
    batch_axes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Batch axis in the model, for inputs and outputs where it is not 0. Clients, and `specs`,
    always have the batch first."""
    constants: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    """Inputs of the model that became constants."""

    @property
    def is_open(self) -> bool:
        """Tell whether the first dimension is dynamic, as a batch or otherwise."""
        return bool(self.specs) and self.specs[0].shape[:1] == (-1,)

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return abstract inputs for tracing, with symbolic dynamic dimensions."""
        smallest = {name: min(sizes) for name, sizes in self.compiled.items()}
        shapes = OpenShapes(self.is_open, self.named, smallest).shapes(self.specs)
        return {
            spec.name: jax.ShapeDtypeStruct(
                self._moved(spec.name, tuple(shape)), spec.datatype.dtype
            )
            for spec, shape in zip(self.specs, shapes, strict=True)
        }

    def sized(self, sizes: Mapping[str, int]) -> tuple[TensorSpec, ...]:
        """Return the inputs with these sizes for dynamic dimensions other than the batch."""
        return tuple(
            replace(
                spec,
                shape=tuple(
                    sizes.get(size, -1) if isinstance(size, str) else size for size in shape
                ),
            )
            for spec, shape in zip(
                self.specs, self.named or [spec.shape for spec in self.specs], strict=True
            )
        )

    def exported(self) -> Mapping[str, tuple[str, Sequence[int | str]]] | tuple[TensorSpec, ...]:
        """Return the inputs in the form that `Exportable` takes."""
        if not self.compiled:
            return self.specs
        return {
            spec.name: (spec.datatype.name, shape)
            for spec, shape in zip(self.specs, self.named, strict=True)
        }

    def _moved(self, name: str, shape: tuple[object, ...]) -> tuple[object, ...]:
        axis = self.batch_axes.get(name, 0)
        if not axis:  # scalars have no batch axis
            return shape
        return (*shape[1 : axis + 1], shape[0], *shape[axis + 1 :])


def resolve(
    inputs: Sequence[GraphInput],
    *,
    shapes: Mapping[str, Sequence[int | str]],
    dimensions: Mapping[str, Sequence[int]],
    max_batch_size: int | None,
    sizes: Mapping[str, Sequence[int]] = MappingProxyType({}),
    batch_axes: Mapping[str, int] = MappingProxyType({}),
) -> Inputs:
    """Resolve all dimensions except the batch; InvalidModel names one that remains dynamic.

    `shapes` replaces input shapes, with -1 for the batch. `dimensions` gives named dynamic
    dimensions a size, or several sizes to compile programs for. `sizes` has input shapes, used for
    the dimensions that are still dynamic. `batch_axes` gives the batch axis of inputs where it is
    not 0.
    """
    _check_known("input", shapes, [item.name for item in inputs])
    items = [
        _closed(_given(item, shapes.get(item.name)), sizes.get(item.name, ())) for item in inputs
    ]
    names = [size for item in items for size in item.shape if isinstance(size, str) and size]
    _check_known("dimension", dimensions, names)
    items = [_batch_first(item, batch_axes.get(item.name, 0)) for item in items]
    settled = tuple(_shape(item, dimensions) for item in items)
    compiled = {
        _identifier(name): tuple(listed) for name, listed in dimensions.items() if len(listed) > 1
    }
    specs = tuple(
        TensorSpec(
            item.name,
            item.datatype,
            tuple(-1 if isinstance(size, str) else size for size in shape),
        )
        for item, shape in zip(items, settled, strict=True)
    )
    batch = _batch(specs, max_batch_size)
    return Inputs(specs, batch, settled if compiled else (), compiled, batch_axes)


def _given(item: GraphInput, given: Sequence[int | str] | None) -> GraphInput:
    """Return an input with the requested shape."""
    if given is None:
        return item
    if len(given) != len(item.shape):
        raise InvalidModel(
            f"input '{item.name}' has {len(item.shape)} dimensions, got {len(given)}"
        )
    return replace(item, shape=tuple("" if size == -1 else size for size in given))


def _batch_first(item: GraphInput, axis: int) -> GraphInput:
    """Return an input with its batch axis moved to the front."""
    if not 0 <= axis < max(1, len(item.shape)):
        raise InvalidModel(
            f"input '{item.name}' has {len(item.shape)} dimensions, so axis {axis} cannot be its"
            " batch"
        )
    shape = item.shape
    return replace(item, shape=(*shape[axis : axis + 1], *shape[:axis], *shape[axis + 1 :]))


def _identifier(name: str) -> str:
    """Return a dimension name that is valid in JAX and differs from the batch's."""
    found = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{found}" if not found.isidentifier() or found == BATCH_DIMENSION else found


def _closed(item: GraphInput, sizes: Sequence[int]) -> GraphInput:
    """Fill in dynamic dimensions of an input from config.pbtxt."""
    if len(sizes) != len(item.shape):
        return item  # reported when the configuration is compared with the model
    shape = tuple(
        given if isinstance(size, str) and given > 0 else size
        for size, given in zip(item.shape, sizes, strict=True)
    )
    return replace(item, shape=shape)


def _check_known(kind: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            shown = ", ".join(dict.fromkeys(known)) or "none"
            hint = "; --shape names it" if kind == "dimension" else ""
            raise InvalidModel(f"the model has no {kind} '{name}', it has {shown}{hint}")


def _shape(item: GraphInput, dimensions: Mapping[str, Sequence[int]]) -> tuple[int | str, ...]:
    sizes: list[int | str] = []
    for axis, size in enumerate(item.shape):
        listed = dimensions.get(size, ()) if isinstance(size, str) else ()
        if axis and isinstance(size, str) and len(listed) > 1:
            sizes.append(_identifier(size))
        else:
            sizes.append(_size(item, axis, listed[0] if len(listed) == 1 else size))
    return tuple(sizes)


def _size(item: GraphInput, axis: int, size: int | str) -> int:
    if isinstance(size, int) and size > 0:
        return size
    if axis == 0:
        return -1
    called = f"'{size}'" if isinstance(size, str) and size else f"number {axis}"
    example = ",".join("-1" if place == 0 else "SIZE" for place in range(len(item.shape)))
    raise InvalidModel(
        f"input '{item.name}': its dimension {called} is dynamic, but only the first may be: set"
        f" its size with --dim NAME=SIZE or --shape {item.name}={example}, or in the dims of the"
        " model's configuration; set several sizes with --dim NAME=SIZE,SIZE"
    )


def _batch(specs: Sequence[TensorSpec], requested: int | None) -> int:
    closed = [spec for spec in specs if spec.shape[:1] != (-1,)]
    if len(closed) == len(specs):
        if requested:
            raise InvalidModel(
                f"input '{specs[0].name}' is {specs[0]}, but with max_batch_size {requested} its"
                " first dimension is -1: change its shape with --shape"
                if specs
                else "the model has no inputs"
            )
        return 0
    if closed:
        raise InvalidModel(
            f"input '{closed[0].name}' is {closed[0]}, but either all inputs start with -1 or none:"
            " change a shape with --shape, locate the batch with --batch-axis, fix a dynamic first"
            " dimension that is not a batch with --dim, or make the input a constant with --const"
        )
    return DEFAULT_MAX_BATCH_SIZE if requested is None else requested
