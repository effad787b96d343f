"""The compiled sizes of open dimensions other than the batch.

Those that a configuration lists are compiled with the load. Others may be compiled when a request
first asks for them, where the configuration allows a number of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import NoReturn, TypeAlias

import numpy as np
from jax.core import ShapedArray

from xlaserve.errors import InvalidModel, InvalidTensor
from xlaserve.model_config import compiled_shapes
from xlaserve.model_config.buckets import BATCH_SIZES
from xlaserve.model_config.compiled_shapes import COMPILED_SHAPES, MAX_ON_DEMAND_SHAPES
from xlaserve.model_config.config import ModelConfig
from xlaserve.tensors import Shape, Tensor, TensorSpec, describe

TRIED_SIZE = 8
"""Size of an open dimension without listed sizes, for trials and analysis."""

DEFAULT_ROWS_ON_DEMAND = 32
"""Default number of batch sizes compiled on demand, for models that compile each size exactly."""

MAX_COMBINATIONS = 64
"""The most that a model is compiled for, each with every batch size."""

Sizes: TypeAlias = tuple[int, ...]
"""One size for each open dimension; () without any."""


@dataclass(frozen=True, slots=True)
class OpenDimensions:
    """Open dimensions and their compiled sizes; nothing is padded."""

    combinations: tuple[Sizes, ...] = ((),)
    """Ascending."""
    places: tuple[tuple[int, int, int], ...] = ()
    """Every (input, axis, dimension)."""
    closed: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Allowed sizes of dimensions without on-demand compilation."""

    @property
    def has_rows(self) -> bool:
        """Tell whether the first dimension is one of them."""
        return any(axis == 0 for _, axis, _ in self.places)

    def specs(self, inputs: Sequence[TensorSpec], sizes: Sizes) -> tuple[TensorSpec, ...]:
        """Return the inputs with these sizes for open dimensions besides the batch."""
        shapes = [list(spec.shape) for spec in inputs]
        for index, axis, dimension in self.places:
            shapes[index][axis] = sizes[dimension]
        return tuple(
            TensorSpec(spec.name, spec.datatype, tuple(shape))
            for spec, shape in zip(inputs, shapes, strict=True)
        )

    def asked(self, model: str, inputs: Sequence[TensorSpec], shapes: Sequence[Shape]) -> Sizes:
        """Return the sizes of a request, whatever they are.

        Raises InvalidTensor for one of 0, and for two of the same dimension.
        """
        found: dict[int, int] = {}
        for index, axis, dimension in self.places:
            size = shapes[index][axis]
            if size not in self.closed.get(dimension, (size,)):
                spec, known = inputs[index], ", ".join(map(str, self.closed[dimension]))
                expected = f"dimension {axis} of size {known} ({COMPILED_SHAPES})"
                got = describe(spec.datatype, shapes[index])
                raise InvalidTensor(model, "input", spec.name, expected, got)
            if not size or found.setdefault(dimension, size) != size:
                spec, wanted = inputs[index], found.get(dimension, "1 or more")
                expected, got = f"dimension {axis} of size {wanted}", f"size {size}"
                raise InvalidTensor(model, "input", spec.name, expected, got)
        return tuple(found[dimension] for dimension in sorted(found))

    def sizes_of(
        self, model: str, inputs: Sequence[TensorSpec], tensors: Sequence[Tensor]
    ) -> Sizes:
        """Return the sizes of a request; raises InvalidTensor for uncompiled ones."""
        found: dict[int, int] = {}
        for index, axis, dimension in self.places:
            shape = tensors[index].shape
            known = sorted({sizes[dimension] for sizes in self.combinations})
            if shape[axis] not in known or found.setdefault(dimension, shape[axis]) != shape[axis]:
                wanted = ", ".join(map(str, [found[dimension]] if dimension in found else known))
                spec = inputs[index]
                setting = COMPILED_SHAPES if axis else BATCH_SIZES
                expected = f"dimension {axis} of size {wanted} ({setting})"
                got = describe(spec.datatype, shape)
                raise InvalidTensor(model, "input", spec.name, expected, got)
        return tuple(found[dimension] for dimension in sorted(found))


def padded(tensor: Tensor, bucket: int) -> Tensor:
    """Return the rows of a tensor, the last one repeated up to `bucket` rows."""
    # Always fresh memory: XLA may read it in place until the outputs are there.
    found = np.empty((bucket, *tensor.shape[1:]), tensor.dtype)
    found[: len(tensor)] = tensor
    # Not zeros: a loop that ends on each of the rows may never end on those.
    found[len(tensor) :] = tensor[-1:] if len(tensor) else 0
    return found


def is_sized(config: ModelConfig) -> bool:
    """Tell whether a configuration gives sizes to open dimensions, or lets requests do so."""
    return COMPILED_SHAPES in config.parameters or bool(on_demand(config))


def on_demand(config: ModelConfig, most: int | None = None, *, exact: bool = False) -> int:
    """Return the limit of shapes compiled on demand; raises InvalidModel.

    `most` is what the server allows any model. `exact`: each number of rows is a shape.
    """
    if exact and MAX_ON_DEMAND_SHAPES not in config.parameters:
        return DEFAULT_ROWS_ON_DEMAND if most is None else min(DEFAULT_ROWS_ON_DEMAND, most)
    text = config.parameters.get(MAX_ON_DEMAND_SHAPES, "0").strip()
    if not text.isdecimal():
        _refuse(MAX_ON_DEMAND_SHAPES, "a number of shapes", f"'{text[:64]}'")
    if most is not None and int(text) > most:
        allowed = f"{most} at most, which is the server's {MAX_ON_DEMAND_SHAPES}"
        _refuse(MAX_ON_DEMAND_SHAPES, allowed, text[:64])
    return int(text)


def read(
    config: ModelConfig,
    inputs: Sequence[TensorSpec],
    avals: Sequence[ShapedArray],
    rows: Sequence[int] = (),
) -> OpenDimensions:
    """Find the open dimensions of an artifact's inputs, and their sizes; raises InvalidModel.

    The first dimension is not one of them where it is a batch. Where it is a size like others,
    `rows` has those that are compiled with the load.
    """
    others = _others(config, inputs, avals, is_alone=not rows)
    if not rows:
        return others
    first = tuple((index, 0, 0) for index in range(len(inputs)))
    rest = tuple((index, axis, dimension + 1) for index, axis, dimension in others.places)
    combinations = tuple((size, *sizes) for size in rows for sizes in others.combinations)
    if len(combinations) > MAX_COMBINATIONS:
        _refuse(COMPILED_SHAPES, f"{MAX_COMBINATIONS} combinations at most", str(len(combinations)))
    closed: dict[int, tuple[int, ...]] = {}
    if rest and not on_demand(config):
        listed = zip(*others.combinations, strict=True)
        closed = {place: tuple(sorted(set(sizes))) for place, sizes in enumerate(listed, 1)}
    return OpenDimensions(combinations, (*first, *rest), MappingProxyType(closed))


def _open_names(
    inputs: Sequence[TensorSpec], avals: Sequence[ShapedArray]
) -> tuple[list[str], tuple[tuple[int, int, int], ...]]:
    names: list[str] = []
    places: list[tuple[int, int, int]] = []
    for index, (spec, aval) in enumerate(zip(inputs, avals, strict=True)):
        for axis, size in enumerate(aval.shape):
            if isinstance(size, int) or not axis:
                continue
            name = str(size)
            if not name.isidentifier():
                raise InvalidModel(
                    f"input '{spec.name}': no size can be chosen for '{name}', expected a "
                    "dimension with a name alone: export it with one of its own"
                )
            if name not in names:
                names.append(name)
            places.append((index, axis, names.index(name)))
    return names, tuple(places)


def tried(
    config: ModelConfig, inputs: Sequence[TensorSpec], avals: Sequence[ShapedArray]
) -> tuple[dict[str, int], OpenDimensions]:
    """Return the smallest compiled size of each open dimension except for the batch.

    By name, and with the places of the dimensions. Raises InvalidModel.
    """
    names, places = _open_names(inputs, avals) if is_sized(config) else ([], ())
    sizes = dict.fromkeys(names, TRIED_SIZE)
    if names and COMPILED_SHAPES in config.parameters:
        listed = _sizes(config.parameters[COMPILED_SHAPES], names)
        sizes = {name: min(listed[name]) for name in names}
    return sizes, OpenDimensions((tuple(sizes.values()),), places)


def _others(
    config: ModelConfig,
    inputs: Sequence[TensorSpec],
    avals: Sequence[ShapedArray],
    *,
    is_alone: bool,
) -> OpenDimensions:
    if not is_sized(config):
        return OpenDimensions()
    names, places = _open_names(inputs, avals)
    if not names and not is_alone and COMPILED_SHAPES not in config.parameters:
        return OpenDimensions()
    if not names:
        written = COMPILED_SHAPES if COMPILED_SHAPES in config.parameters else MAX_ON_DEMAND_SHAPES
        _refuse(written, "open dimensions besides the batch", "none in the artifact")
    if COMPILED_SHAPES not in config.parameters:
        return OpenDimensions((), places)
    sizes = _sizes(config.parameters[COMPILED_SHAPES], names)
    combinations = tuple(product(*(sizes[name] for name in names)))
    if len(combinations) > MAX_COMBINATIONS:
        _refuse(COMPILED_SHAPES, f"{MAX_COMBINATIONS} combinations at most", str(len(combinations)))
    return OpenDimensions(combinations, places)


def _sizes(text: str, names: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    sizes = compiled_shapes.parse(text, names)
    if set(sizes) != set(names):
        _refuse(COMPILED_SHAPES, f"sizes for each of {', '.join(names)}", f"'{text[:64]}'")
    return {name: tuple(sorted(found)) for name, found in sizes.items()}


def _refuse(parameter: str, expected: str, got: str) -> NoReturn:
    raise InvalidModel(f"parameter '{parameter}': expected {expected}, got {got}")
