"""Converts inputs whose datatype the V2 protocol lacks.

Clients send a wider datatype that holds all values, and the graph starts with a Cast. Numbers that
the narrow datatype cannot represent are rounded as ONNX's Cast specifies.
"""

from dataclasses import replace

from xlaserve.importers.onnx.branches import renamed
from xlaserve.importers.onnx.datatypes import name_of
from xlaserve.importers.onnx.graph import Graph, Node


def widened(graph: Graph, opset: int) -> Graph:
    """Return a graph whose inputs have V2 datatypes, with a Cast for each changed input."""
    names = {item.name: f"{item.name}/narrow" for item in graph.inputs if item.narrow}
    if not names:
        return graph
    casts = tuple(
        Node("Cast", "", "", (item.name,), (names[item.name],), opset, {"to": item.narrow})
        for item in graph.inputs
        if item.narrow
    )
    nodes = tuple(renamed(node, names) for node in graph.nodes)
    # `graph.outputs` keeps the old name: an input that is also an output is returned as sent.
    return replace(graph, nodes=(*casts, *nodes))


def said_of(graph: Graph) -> str:
    """Return a message about inputs that clients send in another datatype; may be empty."""
    return "; ".join(
        f"input '{item.name}' is {name_of(item.narrow)} in the model, but clients send"
        f" {item.datatype}"
        for item in graph.inputs
        if item.narrow
    )
