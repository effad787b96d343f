"""Table of the supported operators, and why others are not supported."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import ML_DOMAIN, Node
from xlaserve.importers.onnx.operators.activation import ACTIVATION
from xlaserve.importers.onnx.operators.attention import ATTENTION
from xlaserve.importers.onnx.operators.conversion import CONVERSION
from xlaserve.importers.onnx.operators.convolution import CONVOLUTION
from xlaserve.importers.onnx.operators.elementwise import ELEMENTWISE
from xlaserve.importers.onnx.operators.group_query import GROUP_QUERY
from xlaserve.importers.onnx.operators.indexing import INDEXING
from xlaserve.importers.onnx.operators.joining import JOINING
from xlaserve.importers.onnx.operators.linear import LINEAR
from xlaserve.importers.onnx.operators.loss import LOSS
from xlaserve.importers.onnx.operators.machine_learning import MACHINE_LEARNING
from xlaserve.importers.onnx.operators.microsoft import DOMAIN, FUSED
from xlaserve.importers.onnx.operators.microsoft_quantised import QUANTISED
from xlaserve.importers.onnx.operators.normalisation import NORMALISATION
from xlaserve.importers.onnx.operators.pooling import POOLING
from xlaserve.importers.onnx.operators.quantisation import QUANTISATION
from xlaserve.importers.onnx.operators.recurrent import MICROSOFT_RECURRENT, RECURRENT
from xlaserve.importers.onnx.operators.reduction import REDUCTION
from xlaserve.importers.onnx.operators.resize import RESIZE
from xlaserve.importers.onnx.operators.sampling import SAMPLING
from xlaserve.importers.onnx.operators.selection import SELECTION
from xlaserve.importers.onnx.operators.sequence import SEQUENCE
from xlaserve.importers.onnx.operators.shape import SHAPE
from xlaserve.importers.onnx.operators.signal import SIGNAL
from xlaserve.importers.onnx.operators.support_vectors import SUPPORT_VECTORS
from xlaserve.importers.onnx.operators.table import Family, Operator
from xlaserve.importers.onnx.operators.tree_ensemble import TREES

OPERATORS: Mapping[str, Family] = MappingProxyType(
    {
        "": MappingProxyType(
            {
                **ACTIVATION,
                **ATTENTION,
                **CONVERSION,
                **CONVOLUTION,
                **ELEMENTWISE,
                **INDEXING,
                **JOINING,
                **LINEAR,
                **LOSS,
                **NORMALISATION,
                **POOLING,
                **QUANTISATION,
                **RECURRENT,
                **REDUCTION,
                **RESIZE,
                **SAMPLING,
                **SELECTION,
                **SEQUENCE,
                **SHAPE,
                **SIGNAL,
            }
        ),
        ML_DOMAIN: MappingProxyType({**MACHINE_LEARNING, **SUPPORT_VECTORS, **TREES}),
        DOMAIN: MappingProxyType({**FUSED, **GROUP_QUERY, **MICROSOFT_RECURRENT, **QUANTISED}),
    }
)
"""Operators by domain and name, except those with subgraphs (`control.py`)."""

_IMAGE = "it decodes image files; decode them before the model"
_TEXT = "it computes with strings, which JAX does not support"
_TRAINING = "it is a training operator, which serving does not support"
_RANDOM = "it draws random numbers, but equal requests must get equal answers"
_MAP = "its {} is a map or string, but outputs must be tensors of numbers; {}"

REFUSED = MappingProxyType(
    {
        "Adagrad": _TRAINING,
        "Adam": _TRAINING,
        "Bernoulli": _RANDOM,
        "CastMap": _MAP.format("input", "export the model with this node's output as its input"),
        "CategoryMapper": _MAP.format("input", "send the number of the category instead"),
        "DictVectorizer": _MAP.format("input", "send the resulting vector instead"),
        "Gradient": _TRAINING,
        "ImageDecoder": _IMAGE,
        "Momentum": _TRAINING,
        "Multinomial": _RANDOM,
        "RandomNormal": _RANDOM,
        "RandomNormalLike": _RANDOM,
        "RandomUniform": _RANDOM,
        "RandomUniformLike": _RANDOM,
        "RegexFullMatch": _TEXT,
        "StringConcat": _TEXT,
        "StringNormalizer": _TEXT,
        "StringSplit": _TEXT,
        "TfIdfVectorizer": _TEXT,
    }
)
"""Operators that are unsupported by design, with the reason."""

_NEARBY = 5


def find(node: Node) -> Operator:
    """Return a node's table entry; raises InvalidModel that suggests similar operators."""
    row = OPERATORS.get(node.domain, {}).get(node.operator)
    if row is None:
        raise InvalidModel(_missing(node))
    return row


def _missing(node: Node) -> str:
    if node.operator in REFUSED:
        return f"{node} cannot be converted: {REFUSED[node.operator]}"
    known = sorted({name for family in OPERATORS.values() for name in family})
    close = difflib.get_close_matches(node.operator, known, _NEARBY, cutoff=0.5)
    nearby = f"; did you mean {', '.join(close)}" if close else ""
    return f"{node} is not one of the {len(known)} supported operators{nearby}"
