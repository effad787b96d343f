"""Replaces text labels by class indices, since XLA has no strings.

A classifier with text classes returns the index of the class instead. The labels are stored with
the model, so that clients can look up the name of a class.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from xlaserve.importers.onnx.graph import ML_DOMAIN, Attribute, Graph, Node, reads_of
from xlaserve.tensors import Tensor

Labels: TypeAlias = Mapping[str, tuple[str, ...]]
"""Labels by output; the index in the tuple is the class number."""

_NUMBERS_OF: Mapping[str, str] = MappingProxyType(
    {
        "LinearClassifier": "classlabels_ints",
        "SVMClassifier": "classlabels_ints",
        "TreeEnsembleClassifier": "classlabels_int64s",
    }
)
"""Attributes of ai.onnx.ml classifiers with numeric classes."""

_TEXTS = "classlabels_strings"

_MOVES: Mapping[tuple[str, str], frozenset[int] | None] = MappingProxyType(
    {
        (ML_DOMAIN, "ArrayFeatureExtractor"): frozenset({0}),
        ("", "Concat"): None,
        ("", "Flatten"): frozenset({0}),
        ("", "Gather"): frozenset({0}),
        ("", "Identity"): frozenset({0}),
        ("", "Reshape"): frozenset({0}),
        ("", "Squeeze"): frozenset({0}),
        ("", "Transpose"): frozenset({0}),
        ("", "Unsqueeze"): frozenset({0}),
        ("", "Where"): frozenset({1, 2}),
    }
)
"""Operators that only copy strings -> positions of the inputs that may be strings; None for all."""

_PASSES = frozenset({(ML_DOMAIN, "ZipMap"), ("", "Identity")})
"""Operators that keep the order of class scores."""


def with_numbers(graph: Graph) -> tuple[Graph, Labels]:
    """Replace text labels with class indices; return the graph, and the labels of each output.

    The graph is returned unchanged if its strings do not all come from one list of labels, or if a
    node computes with strings instead of only copying them; the conversion then reports that node.
    """
    lists = {found for node in graph.nodes if (found := _classes(node, graph))}
    if len(lists) != 1:
        return graph, {}
    (classes,) = lists
    if len(set(classes)) != len(classes) or any(_breaks(text) for text in classes):
        return graph, {}
    coding = _Coding(graph, classes)
    nodes = [coding.coded(node) for node in graph.nodes]
    if coding.failed or not coding.numbers & set(graph.outputs):
        return graph, {}
    constants = MappingProxyType({**graph.constants, **coding.constants})
    known = coding.numbers | coding.scores
    labels = {name: classes for name in graph.outputs if name in known}
    return replace(graph, nodes=tuple(nodes), constants=constants), labels


def _breaks(text: str) -> bool:
    """Tell whether a label cannot be stored as one line of a text file."""
    return text.encode().splitlines() != [text.encode()]


def _is_text(value: Tensor | None) -> bool:
    return value is not None and value.dtype.kind == "U"


def _classes(node: Node, graph: Graph) -> tuple[str, ...]:
    """Return the labels that a node has; empty if it has none."""
    if node.domain == ML_DOMAIN and node.operator in _NUMBERS_OF and node.needs(0):
        return replace(node, _read=set()).texts(_TEXTS)
    if (node.domain, node.operator) in _MOVES and node.operator in (
        "ArrayFeatureExtractor",
        "Gather",
    ):
        table = graph.constants.get(node.inputs[0])
        if table is not None and _is_text(table):
            return tuple(map(str, table.reshape(-1)))
    return ()


@dataclass(slots=True)
class _Coding:
    """Replaces label texts by class indices, node by node."""

    graph: Graph
    classes: Sequence[str]
    numbers: set[str] = field(default_factory=set)
    """Names of values that are class indices now."""
    scores: set[str] = field(default_factory=set)
    """Names of values with a column per class."""
    constants: dict[str, Tensor] = field(default_factory=dict)
    failed: bool = False

    def coded(self, node: Node) -> Node:
        """Return a node that produces class indices where it produced texts."""
        kind = (node.domain, node.operator)
        if kind in _PASSES and node.inputs[0] in self.scores:
            self.scores.update(node.outputs)
        texts = [name for name in reads_of(node) if self._stands_for_text(name)]
        if node.domain == ML_DOMAIN and node.operator in _NUMBERS_OF and node.needs(0):
            return self._classifier(node)
        if not texts:
            return node
        places = _MOVES.get(kind, frozenset())
        moved = [
            name
            for place, name in enumerate(node.inputs)
            if self._stands_for_text(name) and (places is None or place in places)
        ]
        # Other inputs, and subgraphs, use the texts themselves.
        if len(moved) != len(texts):
            self.failed = True
            return node
        self.numbers.update(filter(None, node.outputs))
        return replace(node, inputs=tuple(map(self._number, node.inputs)))

    def _stands_for_text(self, name: str) -> bool:
        return name in self.numbers or _is_text(self.graph.constants.get(name))

    def _number(self, name: str) -> str:
        """Return the name of the constant with the indices of a text constant's labels."""
        texts = self.graph.constants.get(name)
        if texts is None or not _is_text(texts):
            return name
        known = {text: number for number, text in enumerate(self.classes)}
        found = [known.get(str(text), -1) for text in texts.reshape(-1)]
        self.failed |= -1 in found
        made = f"{name}/numbers"
        self.failed |= made in self.graph.constants
        self.constants[made] = np.asarray(found, np.int64).reshape(texts.shape)
        return made

    def _classifier(self, node: Node) -> Node:
        if not node.attributes.get(_TEXTS):
            return node
        attributes: dict[str, Attribute] = {
            name: value for name, value in node.attributes.items() if name != _TEXTS
        }
        attributes[_NUMBERS_OF[node.operator]] = tuple(range(len(self.classes)))
        self.numbers.add(node.outputs[0])
        if node.operator == "SVMClassifier" and not node.attributes.get("prob_a"):
            return replace(node, attributes=attributes, _read=set())  # SVM scores are pairwise
        self.scores.update(name for name in node.outputs[1:] if name)
        return replace(node, attributes=attributes, _read=set())
