"""Every operator that is converted, by its name, and why some never are."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from xlaserve.errors import InvalidModel
from xlaserve.models.onnx.graph import ML_DOMAIN, Node
from xlaserve.models.onnx.operators.activation import ACTIVATION
from xlaserve.models.onnx.operators.convolution import CONVOLUTION
from xlaserve.models.onnx.operators.elementwise import ELEMENTWISE
from xlaserve.models.onnx.operators.indexing import INDEXING
from xlaserve.models.onnx.operators.joining import JOINING
from xlaserve.models.onnx.operators.linear import LINEAR
from xlaserve.models.onnx.operators.machine_learning import MACHINE_LEARNING
from xlaserve.models.onnx.operators.normalisation import NORMALISATION
from xlaserve.models.onnx.operators.pooling import POOLING
from xlaserve.models.onnx.operators.quantisation import QUANTISATION
from xlaserve.models.onnx.operators.recurrent import RECURRENT
from xlaserve.models.onnx.operators.reduction import REDUCTION
from xlaserve.models.onnx.operators.resize import RESIZE
from xlaserve.models.onnx.operators.shape import SHAPE
from xlaserve.models.onnx.operators.table import Family, Operator

OPERATORS: Mapping[str, Family] = MappingProxyType(
    {
        "": MappingProxyType(
            {
                **ACTIVATION,
                **CONVOLUTION,
                **ELEMENTWISE,
                **INDEXING,
                **JOINING,
                **LINEAR,
                **NORMALISATION,
                **POOLING,
                **QUANTISATION,
                **RECURRENT,
                **REDUCTION,
                **RESIZE,
                **SHAPE,
            }
        ),
        ML_DOMAIN: MappingProxyType({**MACHINE_LEARNING}),
    }
)
"""Operators by domain and name, but for `If`, which the walk over the graph does."""

_OPEN_SIZE = "how many rows it returns depends on the data, and XLA needs to know before"
_LOOP = "loops are not converted"
_RANDOM = "it draws random numbers, and equal requests should have equal answers"
_TREE = "trees are not converted"
_SEQUENCE = "the V2 protocol has tensors, and no sequences"

REFUSED = MappingProxyType(
    {
        "Bernoulli": _RANDOM,
        "Loop": _LOOP,
        "Multinomial": _RANDOM,
        "NonMaxSuppression": f"{_OPEN_SIZE}; export the model without it",
        "RandomNormal": _RANDOM,
        "RandomNormalLike": _RANDOM,
        "RandomUniform": _RANDOM,
        "RandomUniformLike": _RANDOM,
        "Scan": _LOOP,
        "SequenceAt": _SEQUENCE,
        "SequenceConstruct": _SEQUENCE,
        "SequenceEmpty": _SEQUENCE,
        "SplitToSequence": _SEQUENCE,
        "TreeEnsemble": _TREE,
        "TreeEnsembleClassifier": _TREE,
        "TreeEnsembleRegressor": _TREE,
        "Unique": _OPEN_SIZE,
    }
)
"""Operators that will not be there, and why."""

_NEARBY = 5


def find(node: Node) -> Operator:
    """Return the row of a node's operator, or raise InvalidModel that names node and neighbours."""
    row = OPERATORS.get(node.domain, {}).get(node.operator)
    if row is None:
        raise InvalidModel(_missing(node))
    return row


def _missing(node: Node) -> str:
    if node.operator in REFUSED:
        return f"{node} cannot be converted: {REFUSED[node.operator]}"
    known = sorted({name for family in OPERATORS.values() for name in family})
    close = difflib.get_close_matches(node.operator, known, _NEARBY, cutoff=0.5)
    nearby = f"; there are {', '.join(close)}" if close else ""
    return f"{node} is not among the {len(known)} operators that are converted{nearby}"
