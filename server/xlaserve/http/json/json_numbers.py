"""Numbers of JSON: read into arrays and written from arrays, without an object for each."""

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
"""Whether `read_numbers` is available: simdjson has no wheels for every Python."""

_Form: TypeAlias = tuple[str, type[np.generic]]
_FORMS: Mapping[str, _Form] = MappingProxyType(
    {"f": ("d", np.float64), "i": ("i", np.int64), "u": ("u", np.uint64)}
)
"""By numpy kind: simdjson's exact number types, and numpy's conversion."""

_PARSERS = threading.local()


def read_numbers(datatype: Datatype, text: bytes) -> Tensor | None:
    """Read a flat JSON list of numbers; None for anything else (fast path).

    The numbers have 64 bits: of floats FP64, else INT64 or UINT64, so that the caller can tell
    what does not fit the datatype. A number with a fraction or an exponent is no integer.
    The GIL is held meanwhile, for some 1.5 ns per byte.
    """
    form = _FORMS.get(datatype.dtype.kind)
    if not READS_ARRAYS or form is None:
        return None
    name, dtype = form
    try:
        # A list alone has an `as_buffer`.
        return np.frombuffer(_parser().parse(text).as_buffer(of_type=name), dtype)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def _parser() -> Any:
    """Return the parser of this thread: one holds a single document."""
    found = getattr(_PARSERS, "parser", None)
    if found is None:
        found = _PARSERS.parser = import_module("simdjson").Parser()
    return found


def write_with_numbers(value: object) -> bytes:
    """Write JSON that may hold dense arrays of numbers or truths.

    Each number has as few digits as tell it from the others of its datatype. NaN and infinities,
    which JSON does not have, become null.
    """
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
