"""Turns large attributes of nodes into constant inputs.

A forest can have megabytes of attributes. As graph constants they become parameters that are stored
separately, instead of constants in the program.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import ML_DOMAIN, Graph, Node
from xlaserve.importers.onnx.operators import support_vectors, tree_ensemble
from xlaserve.tensors import DATATYPES, Tensor

_Tables = Callable[..., tuple[Node, dict[str, Tensor]]]

_TABLES: Mapping[str, _Tables] = MappingProxyType(
    {
        **dict.fromkeys(support_vectors.SUPPORT_VECTORS, support_vectors.with_tables),
        **dict.fromkeys(tree_ensemble.TREES, tree_ensemble.with_tables),
    }
)
"""Operators of ai.onnx.ml whose attributes are tables."""

_DOUBLE = 11
"""TensorProto.DOUBLE."""


def as_constants(graph: Graph) -> Graph:
    """Return a graph whose nodes take their tables as inputs.

    Nodes with invalid attributes are left unchanged; their conversion reports the error if they are
    used.
    """
    wide = _has_doubles(graph)
    nodes: list[Node] = []
    constants = dict(graph.constants)
    for node in graph.nodes:
        made, tables = _apart(node, wide=wide)
        if tables.keys() & constants.keys():
            made, tables = node, {}
        nodes.append(made)
        constants.update(tables)
    return replace(graph, nodes=tuple(nodes), constants=MappingProxyType(constants))


def _has_doubles(graph: Graph) -> bool:
    return any(item.datatype is DATATYPES["FP64"] for item in graph.inputs) or any(
        node.operator == "Cast" and node.attributes.get("to") == _DOUBLE for node in graph.nodes
    )


def _apart(node: Node, *, wide: bool) -> tuple[Node, dict[str, Tensor]]:
    tabled = _TABLES.get(node.operator) if node.domain == ML_DOMAIN else None
    if tabled is None:
        return node, {}
    try:
        return tabled(node, wide=wide)
    except InvalidModel:
        return replace(node, _read=set()), {}
