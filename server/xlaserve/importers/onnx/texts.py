"""Moves text conversions at the inputs and outputs of a graph to the host.

XLA has no strings. If a graph only casts text inputs to numbers, and numbers to text outputs, it is
converted without these casts, and the server converts the texts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.importers.onnx.datatypes import STRING, dtype_of
from xlaserve.importers.onnx.graph import Graph, GraphInput, Node, reads_of
from xlaserve.tensors import DATATYPES, Datatype, datatype_of

FILE_NAME = "texts.json"
"""Name of the record in the version directory of a converted model."""

BYTES = DATATYPES["BYTES"]

_KINDS = "iuf"
"""Kinds of numpy dtypes that a text can be parsed as."""

_LIMIT_BYTES = 1 << 20

_ENCODE_BEFORE = (
    "export the model without its text encoders, and encode the texts in a Python model before it"
    " (docs/python-models.md)"
)

_Casts: TypeAlias = Mapping[str, Datatype]


@dataclass(frozen=True, slots=True)
class Texts:
    """Tensors that are text for clients and numbers in the converted graph."""

    inputs: _Casts = field(default_factory=lambda: MappingProxyType({}))
    """Datatypes that text inputs are parsed as, by input name."""
    outputs: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs)


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    inputs: dict[str, str]
    outputs: list[str]


def refuse(graph: Graph) -> None:
    """Raise InvalidModel if an input is text."""
    for item in graph.inputs:
        if item.datatype is BYTES:
            raise InvalidModel(
                f"input '{item.name}' is a string: if the model only casts it to a number, serve"
                f" the file without an import (docs/onnx.md); otherwise {_ENCODE_BEFORE}"
            )


def without_casts(graph: Graph) -> tuple[Graph, Texts]:
    """Remove casts of text inputs and outputs; return the graph and the tensors that were text.

    Raises InvalidModel unless each text input is only cast, and to one datatype, and no node reads
    a text output.
    """
    read = {item.name: _read_as(graph, item) for item in graph.inputs if item.datatype is BYTES}
    written = frozenset(
        name for node in graph.nodes if _casts_to(node) == STRING for name in node.outputs
    ) & frozenset(graph.outputs)
    inner = {name for node in graph.nodes for name in reads_of(node)}
    if written & inner:
        raise InvalidModel(f"output '{min(written & inner)}' is a string that another node reads")
    edges = read.keys() | written
    nodes = tuple(_plain(node, edges) for node in graph.nodes)
    inputs = tuple(
        replace(item, datatype=read[item.name]) if item.name in read else item
        for item in graph.inputs
    )
    return replace(graph, inputs=inputs, nodes=nodes), Texts(MappingProxyType(read), written)


def _read_as(graph: Graph, item: GraphInput) -> Datatype:
    readers = [node for node in graph.nodes if item.name in reads_of(node)]
    numbers = {_casts_to(node) for node in readers}
    if len(numbers) != 1 or None in numbers or item.name in graph.outputs:
        others = [str(node) for node in readers if _casts_to(node) is None]
        reason = f"it is read by {others[0]}" if others else "it is cast to several datatypes"
        raise InvalidModel(
            f"input '{item.name}' is a string, expected a direct cast to numbers: {reason};"
            f" {_ENCODE_BEFORE}"
        )
    dtype = dtype_of(numbers.pop() or 0)
    datatype = datatype_of(dtype)
    if datatype is None or dtype.kind not in _KINDS:
        raise InvalidModel(f"input '{item.name}' is a string cast to {dtype.name}")
    return datatype


def _casts_to(node: Node) -> int | None:
    """Return the target datatype of a Cast, or None for other nodes."""
    to = node.attributes.get("to")
    is_cast = node.operator == "Cast" and not node.domain and isinstance(to, int)
    return to if is_cast and isinstance(to, int) else None


def _plain(node: Node, edges: Iterable[str]) -> Node:
    if _casts_to(node) is None or not {*node.inputs, *node.outputs} & set(edges):
        return node
    return replace(node, operator="Identity", attributes=MappingProxyType({}))


def write(directory: Path, texts: Texts) -> None:
    """Write the record of text tensors to a converted model's version directory."""
    inputs = {name: datatype.name for name, datatype in texts.inputs.items()}
    record = _Record(inputs, sorted(texts.outputs))
    files.write_atomically(directory / FILE_NAME, [msgspec.json.encode(record)])


def read(directory: Path, roots: Roots = ANYWHERE) -> Texts:
    """Read the record of text tensors; raises InvalidModel if it is damaged."""
    if not (directory / FILE_NAME).exists():
        return Texts()
    data = files.read_checked(directory, FILE_NAME, limit_bytes=_LIMIT_BYTES, roots=roots)
    try:
        found = msgspec.json.decode(data, type=_Record)
        inputs = {name: DATATYPES[datatype] for name, datatype in found.inputs.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:
        raise InvalidModel(f"{FILE_NAME}: {error}") from None
    return Texts(MappingProxyType(inputs), frozenset(found.outputs))
