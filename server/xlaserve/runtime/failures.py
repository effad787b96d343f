"""Classifies errors of JAX and Python as out of memory or as invalid models."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from jax.errors import JaxRuntimeError

from xlaserve.errors import InvalidModel, OutOfMemory, XlaserveError

_EXHAUSTED = re.compile(r"([^\n]*: )?RESOURCE_EXHAUSTED: ")
"""Prefix of XLA's out-of-memory errors: their status, or that of their cause. Match only the
prefix: names chosen by the model may contain the same words.
"""


def is_exhausted(error: Exception) -> bool:
    """Tell whether an error of JAX or Python means out of memory."""
    exhausted = isinstance(error, JaxRuntimeError) and _EXHAUSTED.match(str(error))
    return isinstance(error, MemoryError) or bool(exhausted)


def raise_if_exhausted(model: str, error: Exception) -> None:
    """Raise OutOfMemory if the error means that."""
    if isinstance(error, MemoryError):
        raise OutOfMemory(model, "the host is out of memory") from error
    if is_exhausted(error):
        raise OutOfMemory(model, str(error).splitlines()[0][:300]) from error


@contextmanager
def invalid_model(model: str, name: str) -> Iterator[None]:
    """Turn JAX's compilation errors into OutOfMemory or InvalidModel."""
    try:
        yield
    except XlaserveError:
        raise
    # JAX and XLA raise errors of many classes for a corrupt artifact.
    except Exception as error:
        raise_if_exhausted(model, error)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidModel(f"{name} cannot be compiled or run: {lines[0][:300]}") from error
