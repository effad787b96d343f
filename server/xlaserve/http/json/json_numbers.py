"""Fast JSON numbers: parsed into and written from arrays without Python objects per number."""

import threading
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import orjson

from xlaserve.tensors import Datatype, Tensor

READS_ARRAYS = find_spec("simdjson") is not None
"""Whether `read_numbers` is available: simdjson does not have wheels for every Python version."""

_Form: TypeAlias = tuple[str, type[np.generic]]
_FORMS: Mapping[str, _Form] = MappingProxyType(
    {"f": ("d", np.float64), "i": ("i", np.int64), "u": ("u", np.uint64)}
)
"""simdjson's number type and numpy's dtype, by numpy kind."""

_PARSERS = threading.local()


def read_numbers(datatype: Datatype, text: bytes) -> Tensor | None:
    """Parse a flat JSON list of numbers; return None for anything else (fast path).

    Numbers are parsed with 64 bits, as FP64, INT64 or UINT64, so that the caller can detect values
    that do not fit the datatype. A number with a fraction or exponent is not an integer. Holds the
    GIL for about 1.5 ns per byte.
    """
    form = _FORMS.get(datatype.dtype.kind)
    if not READS_ARRAYS or form is None:
        return None
    name, dtype = form
    try:
        # Only a list has `as_buffer`.
        return np.frombuffer(_parser().parse(text).as_buffer(of_type=name), dtype)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def _parser() -> Any:
    """Return this thread's parser, since a parser can hold only one document."""
    found = getattr(_PARSERS, "parser", None)
    if found is None:
        found = _PARSERS.parser = import_module("simdjson").Parser()
    return found


def write_with_numbers(value: object) -> bytes:
    """Serialize JSON that may contain contiguous arrays of numbers or booleans.

    Numbers have the fewest digits that identify them in their datatype. NaN and infinities become
    null, since JSON cannot represent them.
    """
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
