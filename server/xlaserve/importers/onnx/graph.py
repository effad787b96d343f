"""A graph of operators as plain data: nodes, their inputs, and constants."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.tensors import Datatype, Tensor

Attribute: TypeAlias = "int | float | str | Tensor | Graph | tuple[int | float | str, ...]"

ML_DOMAIN = "ai.onnx.ml"
"""Domain of the classical machine learning operators."""

DEFAULT_LIMIT_BYTES = 8 * 2**30
"""Default size limit of a model including its external data."""

_Kind = TypeVar("_Kind")
_SHOWN_NAME = 80


@dataclass(frozen=True, slots=True)
class GraphInput:
    """An input of a graph."""

    name: str
    datatype: Datatype
    shape: tuple[int | str, ...]
    """Sizes; dynamic dimensions have a name or an empty string."""
    narrow: int = 0
    """The model's TensorProto.DataType if the V2 protocol lacks it, otherwise 0."""


@dataclass(frozen=True, slots=True)
class Node:
    """One application of an operator."""

    operator: str
    domain: str
    """Domain of the operator; empty for the standard ONNX operators."""
    name: str
    inputs: tuple[str, ...]
    """Names of values; empty for an omitted optional input."""
    outputs: tuple[str, ...]
    opset: int
    attributes: Mapping[str, Attribute]
    _read: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        domain = f"{self.domain}." if self.domain else ""
        name = self.name or next(iter(self.outputs), "")
        return f"{domain}{self.operator} '{name[:_SHOWN_NAME]}' (opset {self.opset})"

    def unread(self) -> list[str]:
        """Return the attributes that the operator has not read, and therefore ignores."""
        return sorted(set(self.attributes) - self._read)

    def needs(self, output: int) -> bool:
        """Tell whether an output is needed; unneeded ones are missing or have no name."""
        return output < len(self.outputs) and bool(self.outputs[output])

    def obeyed(self, names: Iterable[str]) -> None:
        """Mark attributes as read, for operators that handle them elsewhere."""
        self._read.update(names)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer attribute, or the default if it is missing."""
        return self._get(name, int, default)

    def real(self, name: str, default: float | None = None) -> float:
        """Return a float attribute, or the default if it is missing."""
        return self._get(name, float, default)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string attribute, or the default if it is missing."""
        return self._get(name, str, default)

    def graph(self, name: str) -> "Graph":
        """Return an attribute that is a subgraph."""
        return self._get(name, Graph, None)

    def tensor(self, name: str, default: "Tensor | None" = None) -> Tensor:
        """Return a tensor attribute, or the default if it is missing."""
        return self._get(name, np.ndarray, default)

    def integers(self, name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
        """Return an attribute that is a list of integers, or the default if it is missing."""
        return tuple(map(int, self._items(name, int, default)))

    def reals(self, name: str, default: Sequence[float] = ()) -> tuple[float, ...]:
        """Return an attribute that is a list of floats, or the default if it is missing."""
        return tuple(map(float, self._items(name, float, default)))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return an attribute that is a list of strings; empty if it is missing."""
        return tuple(map(str, self._items(name, str, ())))

    def has(self, name: str) -> bool:
        """Tell whether the node has this attribute, without marking it as read."""
        return name in self.attributes

    def _get(self, name: str, kind: type[_Kind], default: _Kind | None) -> _Kind:
        self._read.add(name)
        value = self.attributes.get(name, default)
        if value is None:
            raise InvalidModel(f"the attribute '{name}' is missing")
        if not isinstance(value, kind):
            raise InvalidModel(
                f"attribute '{name}': expected {kind.__name__}, got {type(value).__name__}"
            )
        return value

    def _items(
        self, name: str, kind: type[int | float | str], default: Sequence[_Kind]
    ) -> Sequence[_Kind | int | float | str]:
        self._read.add(name)
        if name not in self.attributes:
            return default
        value = self.attributes[name]
        if not isinstance(value, tuple) or not all(isinstance(item, kind) for item in value):
            raise InvalidModel(f"attribute '{name}': expected a list of {kind.__name__}")
        return value


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in topological order, with inputs, outputs and constants."""

    name: str
    inputs: tuple[GraphInput, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    constants: Mapping[str, Tensor]
    """Initializers by name."""
    arguments: tuple[str, ...] = ()
    """Argument names of a subgraph."""

    def reads(self) -> Iterator[str]:
        """Yield the names that this graph and its subgraphs read from enclosing graphs."""
        defined = {*self.arguments, *self.constants}
        for node in self.nodes:
            yield from (name for name in reads_of(node) if name not in defined)
            defined.update(node.outputs)
        yield from (name for name in self.outputs if name not in defined)

    def size(self) -> int:
        """Return the number of nodes, including the nodes of subgraphs."""
        return len(self.nodes) + sum(
            graph.size() for node in self.nodes for graph in subgraphs(node)
        )


def reads_of(node: Node) -> Iterator[str]:
    """Yield the names that a node reads, including the names that its subgraphs capture."""
    yield from filter(None, node.inputs)
    for graph in subgraphs(node):
        yield from graph.reads()


def needed(nodes: Sequence[Node], outputs: Iterable[str]) -> list[Node]:
    """Return the nodes that the outputs depend on, with unread outputs removed."""
    wanted = set(outputs)
    kept = []
    for node in reversed(nodes):
        used = tuple(name if name in wanted else "" for name in node.outputs)
        if any(used):
            kept.append(replace(node, outputs=used))
            wanted.update(reads_of(node))
    return kept[::-1]


def subgraphs(node: Node) -> Iterator[Graph]:
    """Yield the graphs among the attributes of a node."""
    for value in node.attributes.values():
        if isinstance(value, Graph):
            yield value


@dataclass(frozen=True, slots=True)
class Model:
    """A graph and the metadata of its file."""

    graph: Graph
    opset: int
    """Opset version of the standard ONNX operators in the file."""
    producer: str
