"""Table of the supported operators, and why others are not supported."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2.operators.activation import ACTIVATION
from xlaserve.importers.pt2.operators.convolution import CONVOLUTION
from xlaserve.importers.pt2.operators.elementwise import ELEMENTWISE
from xlaserve.importers.pt2.operators.indexing import INDEXING
from xlaserve.importers.pt2.operators.linear import LINEAR
from xlaserve.importers.pt2.operators.making import MAKING
from xlaserve.importers.pt2.operators.normalisation import NORMALISATION
from xlaserve.importers.pt2.operators.pooling import POOLING
from xlaserve.importers.pt2.operators.reduction import REDUCTION
from xlaserve.importers.pt2.operators.resizing import RESIZING
from xlaserve.importers.pt2.operators.shape import SHAPE
from xlaserve.importers.pt2.operators.table import Family, Operation

OPERATORS: Family = MappingProxyType(
    {
        **ACTIVATION,
        **CONVOLUTION,
        **ELEMENTWISE,
        **INDEXING,
        **LINEAR,
        **MAKING,
        **NORMALISATION,
        **POOLING,
        **REDUCTION,
        **RESIZING,
        **SHAPE,
    }
)
"""ATen operators by name, or by name and overload; in-place variants use the entry without `_`."""

_RANDOM = "it draws random numbers, but equal requests must get equal answers"
_COUNTED = "its result shape depends on data, but XLA needs fixed shapes"
_STRIDES = "it depends on memory layout: use a reshape or a slice"
_TO_PYTHON = "it converts data to a Python number, so shapes or branches would depend on data"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "_local_scalar_dense": _TO_PYTHON,
        "as_strided": _STRIDES,
        "bernoulli": _RANDOM,
        "item": _TO_PYTHON,
        "masked_select": _COUNTED,
        "multinomial": _RANDOM,
        "nonzero": _COUNTED,
        "nonzero_numpy": _COUNTED,
        "normal": _RANDOM,
        "rand": _RANDOM,
        "rand_like": _RANDOM,
        "randint": _RANDOM,
        "randn": _RANDOM,
        "randn_like": _RANDOM,
        "randperm": _RANDOM,
        "unique": _COUNTED,
        "_unique2": _COUNTED,
    }
)
"""Operators that are unsupported by design, with the reason."""

ATEN = "aten."
_NEARBY = 5


def find(target: str) -> Operation:
    """Return the operation of a target such as `aten.add.Tensor`.

    Raises InvalidModel that suggests similar names if there is none.
    """
    if target.startswith(ATEN):
        overload = target.removeprefix(ATEN)
        name = overload.partition(".")[0]
        found = OPERATORS.get(overload) or OPERATORS.get(name)
        if found is not None:
            return found
        if name in REFUSED:
            raise InvalidModel(f"it cannot be converted: {REFUSED[name]}")
        close = difflib.get_close_matches(name, OPERATORS, _NEARBY, cutoff=0.6)
        nearby = f"; did you mean {', '.join(close)}" if close else ""
    else:
        nearby = "; only aten operators are supported"
    raise InvalidModel(f"it is not one of the {len(OPERATORS)} supported operators{nearby}")
