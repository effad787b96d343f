"""Creates the input tensors: shapes from the metadata, random elements from a fixed seed."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from xlaserve.bench.errors import BenchmarkRefused
from xlaserve.tensors import Kind, Shape, Tensor, TensorSpec

Inputs: TypeAlias = Sequence[tuple[TensorSpec, Tensor]]
_Make: TypeAlias = Callable[[TensorSpec, Shape, np.random.Generator], Tensor]

_SEED = 1
_INTEGERS_BELOW = 8
"""Upper bound of random integers; small, because they are often indices of tokens or rows."""
_WORDS = (b"the", b"server", b"answers", b"every", b"request")
_OPEN = -1


def make_inputs(
    model: str, specs: Sequence[TensorSpec], shapes: Mapping[str, Shape], batch: int
) -> Inputs:
    """Return a tensor for each input; the elements are the same every time.

    `shapes` maps input names to shapes from the command line; `batch` is the size of a dynamic
    first dimension. Raises BenchmarkRefused if a shape is missing or does not match the metadata.
    """
    unknown = sorted(shapes.keys() - {spec.name for spec in specs})
    if unknown:
        names = ", ".join(f"'{spec.name}'" for spec in specs)
        raise BenchmarkRefused(
            f"model '{model}': --shape: no input '{unknown[0]}', its inputs are {names}"
        )
    random = np.random.default_rng(_SEED)
    return [
        (spec, _elements(spec, _shape(model, spec, shapes.get(spec.name), batch), random))
        for spec in specs
    ]


def _shape(model: str, spec: TensorSpec, given: Shape | None, batch: int) -> Shape:
    if given is not None:
        if not spec.accepts(given):
            got = ",".join(map(str, given))
            raise BenchmarkRefused(
                f"model '{model}', input '{spec.name}': expected {spec}, got --shape {got}"
            )
        return given
    if _OPEN in spec.shape[1:]:
        raise BenchmarkRefused(
            f"model '{model}', input '{spec.name}' is {spec}: give its dynamic dimensions sizes"
            f" with --shape {spec.name}={','.join(_example(spec.shape, batch))}"
        )
    return tuple(batch if size == _OPEN else size for size in spec.shape)


def _example(shape: Shape, batch: int) -> Sequence[str]:
    return [
        str(size) if size != _OPEN else "N" if index else str(batch)
        for index, size in enumerate(shape)
    ]


def _elements(spec: TensorSpec, shape: Shape, random: np.random.Generator) -> Tensor:
    return _ELEMENTS[spec.datatype.kind](spec, shape, random)


def _integers(spec: TensorSpec, shape: Shape, random: np.random.Generator) -> Tensor:
    return random.integers(_INTEGERS_BELOW, size=shape).astype(spec.datatype.dtype)


def _floats(spec: TensorSpec, shape: Shape, random: np.random.Generator) -> Tensor:
    return random.random(shape, np.float32).astype(spec.datatype.dtype)


def _booleans(spec: TensorSpec, shape: Shape, random: np.random.Generator) -> Tensor:
    return random.integers(2, size=shape).astype(np.bool_)


def _words(spec: TensorSpec, shape: Shape, random: np.random.Generator) -> Tensor:
    found = np.empty(shape, np.object_)
    for index in np.ndindex(shape):
        found[index] = _WORDS[int(random.integers(len(_WORDS)))]
    return found


_ELEMENTS: Mapping[Kind, Callable[[TensorSpec, Shape, np.random.Generator], Tensor]] = (
    MappingProxyType(
        {
            Kind.BOOLEAN: _booleans,
            Kind.INTEGER: _integers,
            Kind.FLOAT: _floats,
            Kind.TEXT: _words,
        }
    )
)
"""Kind of datatype -> function that creates a random tensor."""
