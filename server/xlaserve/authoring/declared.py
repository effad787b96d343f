"""Validates the inputs of a model as its author declares them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any, TypeAlias

import jax

from xlaserve.artifact.artifact import BATCH_DIMENSION, unnamed
from xlaserve.artifact.shapes import TRIED_SIZE
from xlaserve.artifact.trees import Nesting, flatten_inputs, is_described
from xlaserve.errors import InvalidModel, UnknownDatatype
from xlaserve.model_config.buckets import DEFAULT_MAX_BATCH_SIZE
from xlaserve.tensors import BYTES, DATATYPES, TensorSpec, datatype_named, datatype_of

Described: TypeAlias = tuple[str, Sequence[int]] | tuple[str, Sequence[int | str]]

Inputs: TypeAlias = Mapping[str, Described] | Mapping[str, Any] | Sequence[TensorSpec]
"""Inputs in the order of the function's arguments: `{"x": ("FP32", [-1, 784])}`. An argument that
is a pytree of arrays is described by a pytree; its arrays become inputs with names such as
`x.left.0`."""

_EXAMPLE = "('FP32', [-1, 784])"


def input_specs(inputs: Inputs) -> tuple[TensorSpec, ...]:
    """Return the specs of the declared inputs; raises InvalidModel."""
    specs = (
        tuple(_described_spec(name, described) for name, described in inputs.items())
        if isinstance(inputs, Mapping)
        else tuple(inputs)
    )
    if not specs:
        raise InvalidModel("a model has at least one input")
    for spec in specs:
        if spec.datatype is BYTES:
            raise InvalidModel(f"input '{spec.name}' is BYTES, which JAX arrays cannot hold")
        unnamed = -1 in spec.shape[1:] and not isinstance(inputs, Mapping)
        if unnamed or any(size < -1 for size in spec.shape):
            raise InvalidModel(
                f"input '{spec.name}' is {spec}, but only the first dimension may be -1"
            )
    return specs


def flattened(inputs: Inputs) -> tuple[Inputs, Nesting | None]:
    """Return the inputs by the names of their leaves, and the pytrees of the arguments."""
    if not isinstance(inputs, Mapping):
        _check_specs(inputs)
        return inputs, None
    flat, nesting = flatten_inputs(inputs)
    return {name: _described(name, described) for name, described in flat.items()}, nesting


def _described(name: str, given: Any) -> Described:
    """Return datatype and shape of an input, given as a pair, an array or a ShapeDtypeStruct."""
    pair: Any = given
    if not isinstance(given, type) and hasattr(given, "shape") and hasattr(given, "dtype"):
        pair = given.dtype, tuple(_size(number, size) for number, size in enumerate(given.shape))
    is_pair = not isinstance(pair, str) and isinstance(pair, Sequence) and len(pair) == 2
    if not is_pair or not _is_shape(pair[1]):
        raise InvalidModel(
            f"input '{name}': expected a datatype and a shape, such as {_EXAMPLE}, "
            f"or a jax.ShapeDtypeStruct, got {pair!r}"
        )
    datatype, shape = pair
    # V2 names such as FP32, and invalid values, are kept here and validated later.
    with suppress(TypeError):
        dtype = None if datatype in DATATYPES else jax.numpy.dtype(datatype)
        row = None if dtype is None else datatype_of(dtype)
        if dtype is not None and row is None:
            raise unnamed("input", name, dtype)
        datatype = datatype if row is None else row.name
    return str(datatype), shape


def _is_shape(given: object) -> bool:
    if isinstance(given, str) or not isinstance(given, Sequence):
        return False
    return all(isinstance(one, Integral | str) for one in given)


def _check_specs(inputs: object) -> None:
    specs = [inputs] if isinstance(inputs, str) or not isinstance(inputs, Sequence) else inputs
    for one in specs:
        if not isinstance(one, TensorSpec):
            raise InvalidModel(
                f"inputs: expected a dict by name, such as {{'x': {_EXAMPLE}}}, got {one!r}"
            )


def _size(number: int, size: Any) -> int | str:
    """Return a size as an author writes it: -1 for the batch, a name for another dynamic size."""
    if isinstance(size, int):
        return size
    return str(size) if number else -1


def shapes_of(inputs: Inputs) -> tuple[tuple[str | int, ...], ...]:
    """Return the shapes as the author wrote them."""
    if isinstance(inputs, Mapping):
        return tuple(tuple(shape) for _, shape in inputs.values())
    return tuple(spec.shape for spec in inputs)


def checked_sizes(
    shapes: Sequence[Sequence[str | int]], listed: Mapping[str, Sequence[int]], *, batched: bool
) -> dict[str, int]:
    """Return the smallest listed size of every named dynamic dimension; raises InvalidModel."""
    names = dict.fromkeys(size for shape in shapes for size in shape if isinstance(size, str))
    for name in names:
        if not name.isidentifier() or (batched and name == BATCH_DIMENSION):
            raise InvalidModel(
                f"dimension '{name}': expected a name other than '{BATCH_DIMENSION}', which is"
                " reserved for the batch"
            )
    if listed and set(listed) != set(names):
        known = ", ".join(names) or "none, since no dimension is dynamic"
        raise InvalidModel(f"compiled_shapes: expected sizes for {known}, got {', '.join(listed)}")
    for name, sizes in listed.items():
        if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
            raise InvalidModel(f"compiled_shapes '{name}': expected sizes, each once, got {sizes}")
    return {name: min(listed.get(name, [TRIED_SIZE])) for name in names}


def _described_spec(name: str, given: Any) -> TensorSpec:
    if not is_described(given):
        raise InvalidModel(f"input '{name}' is a tree, expected a datatype and a shape")
    return _input_spec(name, *given)


def _input_spec(name: str, datatype: str, shape: Sequence[int | str]) -> TensorSpec:
    if isinstance(next(iter(shape), 0), str):
        raise InvalidModel(f"input '{name}': its first dimension has a name, expected a size or -1")
    if -1 in shape[1:]:
        raise InvalidModel(
            f"input '{name}': only the first dimension may be -1; give other dynamic dimensions a"
            " name"
        )
    sizes = tuple(-1 if isinstance(size, str) else size for size in shape)
    try:
        return TensorSpec(name, datatype_named(datatype), sizes)
    except UnknownDatatype as error:
        raise InvalidModel(f"input '{name}': {error}") from error


def max_batch_of(requested: int | None, inputs: Sequence[TensorSpec]) -> int:
    closed = [spec for spec in inputs if spec.shape[:1] != (-1,)]
    if requested is None:
        requested = 0 if closed else DEFAULT_MAX_BATCH_SIZE
    if requested and closed:
        raise InvalidModel(
            f"input '{closed[0].name}' is {closed[0]}, but with max_batch_size {requested} its"
            " first dimension is -1"
        )
    if closed and len(closed) < len(inputs):
        raise InvalidModel(
            f"either all inputs start with -1 or none: give input '{closed[0].name}', which is"
            f" {closed[0]}, a leading row dimension"
        )
    return requested


def check_params(before: object, params: object) -> None:
    """Raise InvalidModel if two trees of parameters do not have the same leaves."""
    known, given = (
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (before, params)
    )
    missing = ", ".join(name for name in known if name not in given)
    added = ", ".join(name for name in given if name not in known)
    differences = [
        f"{word} {names}" for word, names in (("lack", missing), ("also have", added)) if names
    ]
    if differences:
        raise InvalidModel(
            f"params {' and '.join(differences)}: expected the tree of the served parameters"
        )
