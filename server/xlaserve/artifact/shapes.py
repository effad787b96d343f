"""The sizes that dynamic dimensions other than the batch are compiled for.

Sizes listed in the configuration are compiled during the load. Others may be compiled on demand, up
to a configured number.
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
"""Size of a dynamic dimension without listed sizes, in trial executions and analysis."""

DEFAULT_ROWS_ON_DEMAND = 32
"""Default maximum number of batch sizes compiled on demand, for models that need exact batch
sizes."""

MAX_COMBINATIONS = 64
"""Maximum number of combinations of sizes, each of which is compiled for every batch size."""

Sizes: TypeAlias = tuple[int, ...]
"""One size per dynamic dimension; empty if there are none."""


@dataclass(frozen=True, slots=True)
class OpenDimensions:
    """The dynamic dimensions of a model and their compiled sizes; requests are not padded."""

    combinations: tuple[Sizes, ...] = ((),)
    """Compiled combinations of sizes, in ascending order."""
    places: tuple[tuple[int, int, int], ...] = ()
    """Every dynamic dimension as (input, axis, index of the dimension)."""
    closed: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Allowed sizes of the dimensions that are not compiled on demand, by index."""

    @property
    def has_rows(self) -> bool:
        """Tell whether the first axis is one of the dynamic dimensions."""
        return any(axis == 0 for _, axis, _ in self.places)

    def specs(self, inputs: Sequence[TensorSpec], sizes: Sizes) -> tuple[TensorSpec, ...]:
        """Return the input specs with these sizes in place of the dynamic dimensions."""
        shapes = [list(spec.shape) for spec in inputs]
        for index, axis, dimension in self.places:
            shapes[index][axis] = sizes[dimension]
        return tuple(
            TensorSpec(spec.name, spec.datatype, tuple(shape))
            for spec, shape in zip(inputs, shapes, strict=True)
        )

    def asked(self, model: str, inputs: Sequence[TensorSpec], shapes: Sequence[Shape]) -> Sizes:
        """Return the sizes of a request, compiled or not.

        Raises InvalidTensor if a size is 0 or not allowed, or if inputs disagree on a dimension.
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
        """Return the sizes of a request; raises InvalidTensor if they are not compiled."""
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
    """Return a copy of a tensor, padded to `bucket` rows by repeating the last one."""
    # A new array each time: XLA may read it without a copy until the outputs are ready.
    found = np.empty((bucket, *tensor.shape[1:]), tensor.dtype)
    found[: len(tensor)] = tensor
    # Do not pad with zeros: a loop that terminates on real rows may not terminate on those.
    found[len(tensor) :] = tensor[-1:] if len(tensor) else 0
    return found


def is_sized(config: ModelConfig) -> bool:
    """Tell whether a configuration lists dynamic dimensions' sizes, or allows others on demand."""
    return COMPILED_SHAPES in config.parameters or bool(on_demand(config))


def on_demand(config: ModelConfig, most: int | None = None, *, exact: bool = False) -> int:
    """Return the maximum number of shapes compiled on demand; raises InvalidModel.

    `most` is the server's limit. With `exact`, each batch size counts as a shape.
    """
    if exact and MAX_ON_DEMAND_SHAPES not in config.parameters:
        return DEFAULT_ROWS_ON_DEMAND if most is None else min(DEFAULT_ROWS_ON_DEMAND, most)
    text = config.parameters.get(MAX_ON_DEMAND_SHAPES, "0").strip()
    if not text.isdecimal():
        _refuse(MAX_ON_DEMAND_SHAPES, "a number of shapes", f"'{text[:64]}'")
    if most is not None and int(text) > most:
        allowed = f"at most {most}, the server's {MAX_ON_DEMAND_SHAPES}"
        _refuse(MAX_ON_DEMAND_SHAPES, allowed, text[:64])
    return int(text)


def read(
    config: ModelConfig,
    inputs: Sequence[TensorSpec],
    avals: Sequence[ShapedArray],
    rows: Sequence[int] = (),
) -> OpenDimensions:
    """Find the dynamic dimensions of an artifact's inputs, and their sizes; raises InvalidModel.

    A batch dimension is not included. If each batch size has its own program, `rows` are the ones
    compiled during the load, and the first dimension is treated like the others.
    """
    others = _others(config, inputs, avals, is_alone=not rows)
    if not rows:
        return others
    first = tuple((index, 0, 0) for index in range(len(inputs)))
    rest = tuple((index, axis, dimension + 1) for index, axis, dimension in others.places)
    combinations = tuple((size, *sizes) for size in rows for sizes in others.combinations)
    if len(combinations) > MAX_COMBINATIONS:
        _refuse(COMPILED_SHAPES, f"at most {MAX_COMBINATIONS} combinations", str(len(combinations)))
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
                    f"input '{spec.name}': cannot choose a size for '{name}', an expression:"
                    " export the model with a plain dimension name"
                )
            if name not in names:
                names.append(name)
            places.append((index, axis, names.index(name)))
    return names, tuple(places)


def tried(
    config: ModelConfig, inputs: Sequence[TensorSpec], avals: Sequence[ShapedArray]
) -> tuple[dict[str, int], OpenDimensions]:
    """Return the smallest compiled size of each dynamic dimension other than the batch, by name.

    Also returns where these dimensions occur. Raises InvalidModel.
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
        _refuse(written, "dynamic dimensions besides the batch", "none in the artifact")
    if COMPILED_SHAPES not in config.parameters:
        return OpenDimensions((), places)
    sizes = _sizes(config.parameters[COMPILED_SHAPES], names)
    combinations = tuple(product(*(sizes[name] for name in names)))
    if len(combinations) > MAX_COMBINATIONS:
        _refuse(COMPILED_SHAPES, f"at most {MAX_COMBINATIONS} combinations", str(len(combinations)))
    return OpenDimensions(combinations, places)


def _sizes(text: str, names: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    sizes = compiled_shapes.parse(text, names)
    if set(sizes) != set(names):
        _refuse(COMPILED_SHAPES, f"sizes for each of {', '.join(names)}", f"'{text[:64]}'")
    return {name: tuple(sorted(found)) for name, found in sizes.items()}


def _refuse(parameter: str, expected: str, got: str) -> NoReturn:
    raise InvalidModel(f"parameter '{parameter}': expected {expected}, got {got}")
