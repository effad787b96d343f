"""The inputs of a graph whose datatype no tensor of the V2 protocol can have.

A client sends them in a wider one that holds each of their values, and the graph begins with a
conversion. What a client sends besides is rounded as ONNX's Cast rounds it.
"""

from dataclasses import replace

from xlaserve.importers.onnx.branches import renamed
from xlaserve.importers.onnx.datatypes import name_of
from xlaserve.importers.onnx.graph import Graph, Node


def widened(graph: Graph, opset: int) -> Graph:
    """Return a graph whose inputs are of the V2 protocol, each converted first."""
    names = {item.name: f"{item.name}/narrow" for item in graph.inputs if item.narrow}
    if not names:
        return graph
    casts = tuple(
        Node("Cast", "", "", (item.name,), (names[item.name],), opset, {"to": item.narrow})
        for item in graph.inputs
        if item.narrow
    )
    nodes = tuple(renamed(node, names) for node in graph.nodes)
    # An input that is an output as well stays what the client sends.
    return replace(graph, nodes=(*casts, *nodes))


def said_of(graph: Graph) -> str:
    """Explain which inputs clients send in another datatype than the model's; empty for none."""
    return "; ".join(
        f"input '{item.name}' is {name_of(item.narrow)} in the model, and sent as {item.datatype}"
        for item in graph.inputs
        if item.narrow
    )
