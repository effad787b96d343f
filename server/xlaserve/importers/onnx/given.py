"""Replaces graph inputs by constants, such as a sampling rate or a threshold."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Graph, GraphInput
from xlaserve.tensors import Tensor


def with_constants(
    graph: Graph, values: Mapping[str, Sequence[str]]
) -> tuple[Graph, dict[str, Tensor]]:
    """Return a graph with inputs replaced by constants, and these constants by input name.

    `values` has the elements of each input as text in C order, or one value for all elements.
    Raises InvalidModel for an unknown input, an invalid number, and an input with a dynamic shape.
    """
    known = {item.name: item for item in graph.inputs}
    constants: dict[str, Tensor] = {}
    for name, texts in values.items():
        if name not in known:
            raise InvalidModel(f"the model has no input '{name}', it has {', '.join(known)}")
        constants[name] = _tensor(known[name], texts)
    inputs = tuple(item for item in graph.inputs if item.name not in constants)
    if constants and not inputs:
        raise InvalidModel("every input is a constant, but a model needs at least one input")
    return replace(graph, inputs=inputs, constants={**graph.constants, **constants}), constants


def _tensor(item: GraphInput, texts: Sequence[str]) -> Tensor:
    shape = tuple(size for size in item.shape if isinstance(size, int))
    if len(shape) < len(item.shape):
        sizes = ", ".join(str(size) or "?" for size in item.shape)
        raise InvalidModel(
            f"input '{item.name}' has the dynamic shape [{sizes}], but a constant needs a fixed"
            " shape: export the model with one"
        )
    read = [_number(item, text) for text in texts]
    count = int(np.prod(shape))
    if len(read) not in (1, count):
        raise InvalidModel(
            f"input '{item.name}': expected 1 number or {count}, for the shape {list(shape)}, got "
            f"{len(read)}"
        )
    return np.asarray(read * count if len(read) == 1 else read, item.datatype.dtype).reshape(shape)


def _number(item: GraphInput, text: str) -> float | int | bool:
    try:
        found = _READERS[item.datatype.dtype.kind](text.strip())
        if item.datatype.dtype.kind in "iu":
            np.asarray(found, item.datatype.dtype)  # raises OverflowError for a number out of range
    except (KeyError, ValueError, OverflowError):
        raise InvalidModel(
            f"input '{item.name}': expected a number of {item.datatype.name}, got '{text[:40]}'"
        ) from None
    return found


_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}

_READERS: Mapping[str, Callable[[str], float | int | bool]] = {
    "b": lambda text: _BOOLEANS[text.lower()],
    "i": int,
    "u": int,
    "f": float,
    "V": float,
}
"""Number parsers by the kind of the numpy dtype; bfloat16 has kind V."""
