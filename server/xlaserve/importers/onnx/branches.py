"""Inlines subgraphs into the graph around them, with unique names."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from xlaserve.importers.onnx.graph import Attribute, Graph, Node
from xlaserve.tensors import Tensor


def inlined(node: Node, branch: Graph) -> tuple[dict[str, Tensor], list[Node]]:
    """Return the constants and nodes of a branch with unique names; outputs get the If's names."""
    prefix = f"{next(filter(None, node.outputs))}/"
    defined = {*branch.constants, *(name for inner in branch.nodes for name in inner.outputs)}
    names = {name: prefix + name for name in defined if name}
    nodes = [renamed(inner, names) for inner in branch.nodes]
    for name, result in zip(node.outputs, branch.outputs, strict=True):
        if name:
            source = names.get(result, result)
            nodes.append(Node("Identity", "", "", (source,), (name,), node.opset, {}))
    return {names[name]: value for name, value in branch.constants.items()}, nodes


def without_constants(node: Node) -> tuple[dict[str, Tensor], Node]:
    """Hoist the constants of a node's subgraphs into the outer graph; return them and the node.

    There they are treated like any constant: large ones become parameters.
    """
    found: dict[str, Tensor] = {}
    prefix = next(filter(None, node.outputs))
    attributes: dict[str, Attribute] = {
        name: _moved(value, f"{prefix}/{name}/", found) if isinstance(value, Graph) else value
        for name, value in node.attributes.items()
    }
    return found, replace(node, attributes=attributes)


def _moved(graph: Graph, prefix: str, found: dict[str, Tensor]) -> Graph:
    constants = dict(graph.constants)
    nodes = []
    for node in graph.nodes:
        value = node.attributes.get("value")
        if node.operator == "Constant" and not node.domain and isinstance(value, np.ndarray):
            constants[node.outputs[0]] = value
        else:
            nodes.append(node)
    names = {name: prefix + name for name in constants}
    found.update({names[name]: value for name, value in constants.items()})
    renamed = _renamed_graph(replace(graph, nodes=tuple(nodes), constants={}), names)
    inner = []
    for node in renamed.nodes:
        of_node = f"{prefix}{next(filter(None, node.outputs), '')}/"
        attributes: dict[str, Attribute] = {
            name: _moved(value, f"{of_node}{name}/", found) if isinstance(value, Graph) else value
            for name, value in node.attributes.items()
        }
        inner.append(replace(node, attributes=attributes))
    return replace(renamed, nodes=tuple(inner))


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """Return a node with renamed values, also in its subgraphs."""
    attributes: dict[str, Attribute] = {
        name: _renamed_graph(value, names) if isinstance(value, Graph) else value
        for name, value in node.attributes.items()
    }
    return replace(
        node,
        inputs=tuple(names.get(name, name) for name in node.inputs),
        outputs=tuple(names.get(name, name) for name in node.outputs),
        attributes=attributes,
    )


def _renamed_graph(graph: Graph, names: Mapping[str, str]) -> Graph:
    # A subgraph may define a name before the outer graph does; that definition is renamed too.
    return replace(
        graph,
        arguments=tuple(names.get(name, name) for name in graph.arguments),
        constants={names.get(name, name): value for name, value in graph.constants.items()},
        nodes=tuple(renamed(node, names) for node in graph.nodes),
        outputs=tuple(names.get(name, name) for name in graph.outputs),
    )
